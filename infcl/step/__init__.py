"""FEATURE GRADIENTS -> TOWER GRADIENTS: grad_cache is the step, offload where pixels wait between its two passes."""
