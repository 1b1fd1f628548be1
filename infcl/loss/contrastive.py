"""The losses as modules: one picked by name, and drop-ins for open_clip's.

    ContrastiveLoss    Inf-CL, its dense baselines or SigLIP by name; several captions per image
    InfCLLoss          in place of open_clip.loss.ClipLoss
    SigLipLoss         in place of open_clip.loss.SigLipLoss

In: image and text features [b, D] of this rank, scale (and bias). Out: a float32 scalar whose gradients average over
the group to those of the global mean loss, whichever loss is chosen.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl.loss.captions import captions_loss
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
        captions: number of captions of each image, for text features [t b, D] (infcl/loss/captions.py); None for text
            features [b, D]. Of inf_cl only.
        fixed_shape: all calls have features of one shape, as in training. The ranks' shapes are then compared in the
            first call only (for which the host waits for the GPU); a rank that has another one later gets a ValueError
            before it sends anything, alone, so its process has to end.
        **options: fields of infcl.RingOptions; the dense losses compute in the features' dtype and have no ring.

    Raises:
        ValueError: an unknown loss, or one that does not take such duplicates.
        TypeError: an unknown option.
    """

    over_all = False  # the group is torch.distributed's WORLD, which a copied or pickled module could not hold

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None = None,
        duplicates: str = "negative",
        captions: int | None = None,
        fixed_shape: bool = False,
        **options,
    ):
        super().__init__()
        if name not in LOSSES:
            raise ValueError(f"unknown loss '{name}'; one of {LOSSES}")
        if duplicates != "negative" and (name not in TILED or duplicates not in DUPLICATES):
            raise ValueError(f"duplicates={duplicates!r} for '{name}': one of {DUPLICATES}, of the losses {TILED}")
        assert captions is None or name == "inf_cl", "only inf_cl takes several captions per image"
        RingOptions(**options)  # TypeError for an unknown one
        self.name, self.group, self.duplicates, self.captions = name, group, duplicates, captions
        self.fixed_shape, self.options = fixed_shape, options if name in TILED else {}
        self._agreed: torch.Size | None = None  # of the images' features, once all ranks have the same

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss.

        Args:
            image_features, text_features: [b, D], or [t b, D] texts with several captions per image.
            logit_scale, logit_bias: float or one element. Only siglip uses a bias (None: 0); softmaxes cancel it.
            output_dict: return {"contrastive_loss": loss}, as open_clip's losses do.
            image_ids, text_ids: int64 [b], as `duplicates` needs them; several captions per image take image_ids only.

        Returns:
            0-dim, float32 (float64 for float64 matmuls).
        """
        function, options = _LOSSES[self.name], {**self.options, "group": self._group()}
        if self.duplicates != "negative":
            options |= {"image_ids": image_ids, "text_ids": text_ids, "duplicates": self.duplicates}
        if self.captions is not None:
            function, options["captions"] = captions_loss, self.captions
            options.pop("text_ids", None)
        if self.name == "siglip":
            options["logit_bias"] = 0.0 if logit_bias is None else logit_bias
        if self.fixed_shape:
            options["compare_ranks"] = self._agreed is None
            self._require_agreed(image_features.shape)
        with torch.autocast(image_features.device.type, enabled=False):
            loss = function(image_features, text_features, logit_scale, **options)
        self._agreed = image_features.shape
        return {"contrastive_loss": loss} if output_dict else loss

    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.over_all else self.group

    def _require_agreed(self, shape: torch.Size) -> None:
        if self._agreed not in (None, shape):
            rank = 0 if self.group is None else dist.get_rank(self.group)
            raise ValueError(
                f"{self.name}: rank {rank} has features of shape {tuple(shape)}, all ranks had {tuple(self._agreed)} "
                "in the first call; with fixed_shape=True every call needs as many samples"
            )

    def extra_repr(self) -> str:
        return self.name


class InfCLLoss(ContrastiveLoss):
    """`inf_cl_loss` as a module with open_clip's arguments.

    The averages are those of local_loss=True, gather_with_grad=True. gather_with_grad=False at world_size > 1 is
    rejected, since it asks for other gradients than the exact ones (without local_loss features' gradients
    1 / world_size of them; with it, without the other ranks' terms). local_loss=False changes what a rank reports,
    not what data parallelism averages, and is accepted. cache_labels has nothing to cache. A logit_bias changes
    nothing: a constant added to all logits cancels in both softmaxes.

    Args:
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod: as of open_clip.loss.ClipLoss;
            world_size > 1 means torch.distributed's WORLD, of which they must be rank and size.
        group: where the ring runs, in place of WORLD.
        duplicates, **options: as of `inf_cl_loss`.

    Raises:
        ValueError: use_horovod, gradients that are not exact, or a rank or size that is not the group's.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        group: dist.ProcessGroup | None = None,
        duplicates: str = "negative",
        **options,
    ):
        if use_horovod:
            raise ValueError("use_horovod=True: the ring runs over torch.distributed only")
        if world_size > 1 and not gather_with_grad:
            raise ValueError(
                f"world_size {world_size} with gather_with_grad=False asks for gradients that are not the exact ones; "
                "pass local_loss=True, gather_with_grad=True"
            )
        super().__init__("inf_cl", group=group, duplicates=duplicates, **options)
        self.over_all = _is_over_all(rank, world_size, group)


class SigLipLoss(ContrastiveLoss):
    """`siglip_loss` as a module with open_clip's arguments.

    dist_impl selects how open_clip's ranks exchange texts; here they always travel round the ring, so it changes
    nothing. cache_labels has nothing to cache.

    Args:
        cache_labels, rank, world_size, dist_impl: as of open_clip.loss.SigLipLoss; rank and world_size as of InfCLLoss.
        group: where the ring runs, in place of WORLD.
        duplicates, **options: as of `siglip_loss`.

    Raises:
        ValueError: a rank or size that is not the group's.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        duplicates: str = "negative",
        **options,
    ):
        super().__init__("siglip", group=group, duplicates=duplicates, **options)
        self.over_all = _is_over_all(rank, world_size, group)


def _is_over_all(rank: int, world_size: int, group: dist.ProcessGroup | None) -> bool:
    """Whether the ring runs over WORLD. ValueError unless this process is this rank of so many in its group."""
    if world_size <= 1 and rank == 0:
        return False
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"rank {rank}, world_size {world_size}: torch.distributed is not initialised")
    actual = dist.get_rank(group), dist.get_world_size(group)  # None: of WORLD
    if actual != (rank, world_size):
        raise ValueError(f"rank {rank}, world_size {world_size}: the process group says {actual[0]}, {actual[1]}")
    return group is None
