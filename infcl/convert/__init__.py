"""Export and import of weights, and model cards."""
