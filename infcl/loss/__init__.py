"""The losses: features and scale -> loss -> feature gradients. Read in this order:

inf_cl       public function -> autograd.Function -> ring_forward, ring_backward -> a tile (infcl/kernels)
gradients    the backward pass around the ring, shared by all tiled losses
ring, links  communication of blocks between ranks
inputs       options, checks and operands of a call; duplicates: ids of samples
siglip, info_nce, nt_xent, captions    the other tiled losses; dense: baselines that store the logits
distillation the softmaxes of a teacher, by the same ring and tiles
matryoshka   any of them at several prefix widths
contrastive  the losses as modules: by name, or as drop-ins for open_clip's
"""
