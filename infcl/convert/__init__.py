"""Export and import of weights, model card."""
