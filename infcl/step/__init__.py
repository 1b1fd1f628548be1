"""Feature gradients -> tower gradients: grad_cache is the step, offload stores pixels between its two passes."""
