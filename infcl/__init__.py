"""infcl: exact contrastive pre-training at any batch size.

The package reads in the order in which data flows:

    shard -> sample -> batch -> micro-batch -> features -> ring of tiles -> loss -> feature gradients
          -> tower gradients -> ZeRO step -> checkpoint -> evaluation -> export

    config, parallel   one dataclass of flags; process groups, ranks, seeds
    data/              shard -> sample -> batch
    towers/            micro-batch -> features
    kernels/           features -> tiles: one pair of blocks, no autograd, no communication
    loss/              tiles -> ring -> loss -> feature gradients
    step/              feature gradients -> tower gradients: the gradient cache
    train/             tower gradients -> ZeRO step, and the loop around it
    evaluate/, export  zero-shot, retrieval; the model for others

As a library it needs torch alone: `from infcl import contrastive_step, Encoders, split_batch` trains any encoders, with
the losses `inf_cl_loss`, `siglip_loss`, `info_nce_loss`, `nt_xent_loss` and their RingOptions; InfCLLoss and SigLipLoss
take the place of open_clip's.
"""

from infcl.loss.contrastive import InfCLLoss, SigLipLoss
from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.info_nce import info_nce_loss
from infcl.loss.inputs import RingOptions
from infcl.loss.nt_xent import nt_xent_loss
from infcl.loss.siglip import siglip_loss
from infcl.step.contrastive import Encoders, contrastive_step, split_batch

__version__ = "0.1.0"

__all__ = [
    "Encoders",
    "InfCLLoss",
    "RingOptions",
    "SigLipLoss",
    "contrastive_step",
    "inf_cl_loss",
    "info_nce_loss",
    "nt_xent_loss",
    "siglip_loss",
    "split_batch",
]
