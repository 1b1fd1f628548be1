"""Tiles -> ring -> loss -> feature gradients.

links, ring, lse, gradients, tiled; the losses inf_cl, siglip, info_nce, nt_xent and the baselines in dense;
contrastive picks by name.
"""
