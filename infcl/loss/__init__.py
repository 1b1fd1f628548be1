"""Tiles -> ring -> loss -> feature gradients: lse, ring, inf_cl, siglip, dense; contrastive picks by name."""
