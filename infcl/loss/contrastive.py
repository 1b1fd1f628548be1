"""Pick a contrastive loss by name: one module for Inf-CL, its dense baselines and SigLIP.

In: image and text features [b, D] of this rank, scale (and bias). Out: a float32 scalar whose gradients average over
the group to those of the global mean loss, whichever name is chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl.kernels import WORKSPACE_BYTES
from infcl.loss.dense import clip_loss, disco_loss, open_clip_loss
from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.siglip import siglip_loss

TILED: dict[str, Callable[..., Tensor]] = {"inf_cl": inf_cl_loss, "siglip": siglip_loss}
_DENSE: dict[str, Callable[..., Tensor]] = {"clip": clip_loss, "open_clip": open_clip_loss, "disco": disco_loss}
LOSSES = ("inf_cl", "clip", "open_clip", "disco", "siglip")


class ContrastiveLoss(nn.Module):
    """`loss = ContrastiveLoss("inf_cl", group=dp_group)(image_features, text_features, logit_scale)`.

    name: one of LOSSES. group: the data-parallel process group, None for a single process.
    fixed_shape: all calls have features of one shape, as in training. The ranks' shapes are then compared in the first
        call only (for which the host waits for the GPU); a rank that has another one later gets a ValueError before it
        sends anything, alone, so its process has to end.
    The other options are those of `inf_cl_loss`; the dense losses compute in the features' dtype and have no ring.
    """

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None = None,
        tile: str = "auto",
        tile_dtype: str | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        ring: str = "auto",
        ranks_per_node: int | None = None,
        ring_overlap: str = "on",
        fixed_shape: bool = False,
    ):
        super().__init__()
        if name not in LOSSES:
            raise ValueError(f"unknown loss '{name}'; one of {LOSSES}")
        self.name, self.fixed_shape = name, fixed_shape
        self._agreed: torch.Size | None = None  # of the images' features, once all ranks have the same
        self.options: dict[str, Any] = {"group": group}
        if name in TILED:
            self.options |= {"tile": tile, "tile_dtype": tile_dtype, "workspace_bytes": workspace_bytes}
            self.options |= {"ring": ring, "ranks_per_node": ranks_per_node, "ring_overlap": ring_overlap}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        """0-dim, float32 (float64 for float64 products). Only siglip uses a bias (None: 0); softmaxes cancel it."""
        arguments = [image_features, text_features, logit_scale]
        if self.name == "siglip":
            arguments.append(0.0 if logit_bias is None else logit_bias)
        options = self.options
        if self.fixed_shape:
            options = options | {"compare_ranks": self._agreed is None}
            self._require_agreed(image_features.shape)
        with torch.autocast(image_features.device.type, enabled=False):
            loss = (TILED | _DENSE)[self.name](*arguments, **options)
        self._agreed = image_features.shape
        return loss

    def _require_agreed(self, shape: torch.Size) -> None:
        if self._agreed not in (None, shape):
            rank = 0 if self.options["group"] is None else dist.get_rank(self.options["group"])
            raise ValueError(
                f"{self.name}: rank {rank} has features of shape {tuple(shape)}, all ranks had {tuple(self._agreed)} "
                "in the first call; with fixed_shape=True every call needs as many pairs"
            )

    def extra_repr(self) -> str:
        return self.name
