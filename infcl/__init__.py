"""infcl: exact contrastive pre-training at any batch size.

Read the packages in the order of the data flow:

    shard -> sample -> batch -> micro-batch -> features -> ring of tiles -> loss -> feature gradients
          -> tower gradients -> ZeRO step -> checkpoint -> evaluation -> export

    config/, parallel/  one dataclass of flags; process groups, ranks, seeds
    data/               shard -> sample -> batch
    models/             micro-batch -> features
    kernels/            features -> tiles: one pair of blocks, no autograd, no communication
    loss/               tiles -> ring -> loss -> feature gradients
    step/               feature gradients -> tower gradients: the gradient cache
    engine/, train/     tower gradients -> ZeRO step; the training loop
    evaluate/, convert/ zero-shot and retrieval; export to other libraries

The library needs torch only. `contrastive_step`, `Encoders` and `split_batch` train any encoders with `inf_cl_loss`,
`siglip_loss`, `info_nce_loss` or `nt_xent_loss`, each also wrapped by `matryoshka`.
`RingOptions` lists the losses' options. `InfCLLoss` and `SigLipLoss` are drop-ins for open_clip's losses.
"""

from infcl.loss.contrastive import InfCLLoss, SigLipLoss
from infcl.loss.distillation import distillation_loss
from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.info_nce import info_nce_loss
from infcl.loss.inputs import RingOptions
from infcl.loss.matryoshka import matryoshka
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
    "distillation_loss",
    "inf_cl_loss",
    "info_nce_loss",
    "matryoshka",
    "nt_xent_loss",
    "siglip_loss",
    "split_batch",
]
