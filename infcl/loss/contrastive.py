"""Pick a contrastive loss by name: one module for Inf-CL, its dense baselines and SigLIP.

In: image and text features [b, D] of this rank, scale (and bias). Out: a float32 scalar whose gradients average over
the group to those of the global mean loss, whichever name is chosen.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl.loss.dense import clip_loss, disco_loss, open_clip_loss
from infcl.loss.duplicates import DUPLICATES
from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.inputs import RingOptions
from infcl.loss.siglip import siglip_loss

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "inf_cl": inf_cl_loss,
    "clip": clip_loss,
    "open_clip": open_clip_loss,
    "disco": disco_loss,
    "siglip": siglip_loss,
}
LOSSES = tuple(_LOSSES)
TILED = ("inf_cl", "siglip")  # the others hold logits in memory


class ContrastiveLoss(nn.Module):
    """`loss = ContrastiveLoss("inf_cl", group=dp_group)(image_features, text_features, logit_scale)`.

    Args:
        name: one of LOSSES.
        group: the data-parallel process group, None for a single process.
        duplicates: what pairs of other samples with an equal id are (infcl/loss/duplicates.py); tiled losses only.
        fixed_shape: all calls have features of one shape, as in training. The ranks' shapes are then compared in the
            first call only (for which the host waits for the GPU); a rank that has another one later gets a ValueError
            before it sends anything, alone, so its process has to end.
        **options: fields of infcl.RingOptions; the dense losses compute in the features' dtype and have no ring.
    """

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None = None,
        duplicates: str = "negative",
        fixed_shape: bool = False,
        **options,
    ):
        super().__init__()
        if name not in LOSSES:
            raise ValueError(f"unknown loss '{name}'; one of {LOSSES}")
        if duplicates != "negative" and (name not in TILED or duplicates not in DUPLICATES):
            raise ValueError(f"duplicates={duplicates!r} for '{name}': one of {DUPLICATES}, of the losses {TILED}")
        RingOptions(**options)  # TypeError for an unknown one
        self.name, self.group, self.duplicates, self.fixed_shape = name, group, duplicates, fixed_shape
        self.options = options if name in TILED else {}
        self._agreed: torch.Size | None = None  # of the images' features, once all ranks have the same

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor:
        """0-dim, float32 (float64 for float64 matmuls). Only siglip uses a bias (None: 0); softmaxes cancel it."""
        arguments = [image_features, text_features, logit_scale]
        if self.name == "siglip":
            arguments.append(0.0 if logit_bias is None else logit_bias)
        options = {**self.options, "group": self.group}
        if self.duplicates != "negative":
            options |= {"image_ids": image_ids, "text_ids": text_ids, "duplicates": self.duplicates}
        if self.fixed_shape:
            options["compare_ranks"] = self._agreed is None
            self._require_agreed(image_features.shape)
        with torch.autocast(image_features.device.type, enabled=False):
            loss = _LOSSES[self.name](*arguments, **options)
        self._agreed = image_features.shape
        return loss

    def _require_agreed(self, shape: torch.Size) -> None:
        if self._agreed not in (None, shape):
            rank = 0 if self.group is None else dist.get_rank(self.group)
            raise ValueError(
                f"{self.name}: rank {rank} has features of shape {tuple(shape)}, all ranks had {tuple(self._agreed)} "
                "in the first call; with fixed_shape=True every call needs as many samples"
            )

    def extra_repr(self) -> str:
        return self.name
