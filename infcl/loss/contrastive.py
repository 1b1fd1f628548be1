"""The losses as modules: one selected by name, and drop-ins for open_clip's.

    ContrastiveLoss    Inf-CL, its dense baselines or SigLIP by name; several captions per image
    InfCLLoss          drop-in for open_clip.loss.ClipLoss
    SigLipLoss         drop-in for open_clip.loss.SigLipLoss

In: image and text features [b, D] of this rank, scale (and bias). Out: a float32 scalar. For every loss, the mean of
its gradients over the group is the gradient of the global mean loss.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl.loss.captions import captions_loss
from infcl.loss.dense import dense_loss
from infcl.loss.distillation import distillation_loss
from infcl.loss.duplicates import DUPLICATES
from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.inputs import DEFAULT_OPTIONS, RingOptions
from infcl.loss.siglip import siglip_loss

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "inf_cl": inf_cl_loss,
    **{impl: partial(dense_loss, impl=impl) for impl in ("clip", "open_clip", "disco")},
    "siglip": siglip_loss,
}
LOSSES = tuple(_LOSSES)
TILED = ("inf_cl", "siglip")  # the others store the logits


class ContrastiveLoss(nn.Module):
    """Contrastive loss selected by name.

    Example: `loss = ContrastiveLoss("inf_cl", group=dp_group)(image_features, text_features, logit_scale)`.

    Args:
        name: one of LOSSES.
        group: the data-parallel process group, None for a single process.
        duplicates: role of entries of different samples with an equal id (infcl/loss/duplicates.py); tiled losses only.
        margin: leave out likely false negatives (see `inf_cl_loss`); tiled losses only.
        distillation: weight of the distillation loss, which is added if a call has a teacher.
        captions: captions per image, for text features [t b, D] (infcl/loss/captions.py); None for text features
            [b, D]. inf_cl only.
        fixed_shape: all calls have features of one shape, as in training. The ranks compare their shapes in the first
            call only, because the comparison makes the host wait for the GPU. If one rank's shape or requires_grad
            changes later, only that rank raises ValueError, before it sends anything; its process must then exit.
        options: the dense losses use compare_ranks only: they compute in the features' dtype.

    Raises:
        ValueError: unknown loss, or duplicates or a margin that the loss does not support.
    """

    over_all = False  # use torch.distributed's WORLD; stored as a flag because a process group cannot be pickled

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None = None,
        duplicates: str = "negative",
        margin: float | None = None,
        distillation: float = 1.0,
        captions: int | None = None,
        fixed_shape: bool = False,
        options: RingOptions = DEFAULT_OPTIONS,
    ):
        super().__init__()
        if name not in LOSSES:
            raise ValueError(f"unknown loss '{name}'; one of {LOSSES}")
        if duplicates != "negative" and (name not in TILED or duplicates not in DUPLICATES):
            raise ValueError(f"duplicates={duplicates!r} for '{name}': one of {DUPLICATES}, of the losses {TILED}")
        assert captions is None or name == "inf_cl", "only inf_cl takes several captions per image"
        if margin is not None and name not in TILED:
            raise ValueError(f"margin={margin} for '{name}': it is for the losses {TILED}")
        self.name, self.group, self.duplicates, self.captions = name, group, duplicates, captions
        self.margin, self.distillation = margin, distillation
        self.fixed_shape, self.options = fixed_shape, options
        self._agreed: dict[str, tuple] = {}  # what the ranks have compared

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        teacher: tuple[Tensor, Tensor, float] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss.

        Args:
            image_features, text_features: [b, D], or [t b, D] texts with several captions per image.
            logit_scale, logit_bias: float or one element. Only siglip uses a bias (None: 0); it cancels in a softmax.
            output_dict: return {"contrastive_loss": loss}, as open_clip's losses do.
            ids: int64 [b], if `duplicates` needs them: equal for equal images (or equal texts).
            teacher: its image and text features [b, E] and the factor of their cosines, for `distillation_loss` with
                the first text of each image.

        Returns:
            The loss, 0-dim, float32 (float64 for float64 matmuls).
        """
        group = dist.group.WORLD if self.over_all else self.group
        arguments: dict[str, Any] = {"group": group, "options": self.options}
        function = _LOSSES[self.name]
        if self.duplicates != "negative":
            arguments |= {"ids": ids, "duplicates": self.duplicates}
        if self.margin is not None:
            arguments["margin"] = self.margin
        if self.captions is not None:
            function, arguments["captions"] = captions_loss, self.captions
        if self.name == "siglip":
            arguments["logit_bias"] = 0.0 if logit_bias is None else logit_bias
        own: dict[str, tuple] = {"shape": tuple(image_features.shape)}
        if torch.is_grad_enabled():
            own["requires_grad"] = image_features.requires_grad, text_features.requires_grad
        if self.fixed_shape:
            self._require_agreed(own)
            if own.keys() <= self._agreed.keys():
                arguments["options"] = replace(self.options, compare_ranks=False)
        with torch.autocast(image_features.device.type, enabled=False):
            loss = function(image_features, text_features, logit_scale, **arguments)
            if teacher is not None:
                first_texts = text_features[:: len(text_features) // len(image_features)]
                of_teacher = dict(zip(("teacher_image_features", "teacher_text_features", "teacher_scale"), teacher))
                of_teacher |= {"group": group, "options": arguments["options"]}
                divergence = distillation_loss(image_features, first_texts, logit_scale, **of_teacher)
                loss = loss + self.distillation * divergence
        self._agreed |= own
        return {"contrastive_loss": loss} if output_dict else loss

    def _require_agreed(self, own: dict[str, tuple]) -> None:
        for what, value in own.items():
            if self._agreed.get(what, value) != value:
                rank = 0 if self.group is None else dist.get_rank(self.group)
                raise ValueError(
                    f"{self.name}: rank {rank} has features of {what} {value}, all ranks had {self._agreed[what]} in "
                    "the first call; with fixed_shape=True every call needs as many samples and the same towers trained"
                )


class InfCLLoss(ContrastiveLoss):
    """`inf_cl_loss` as a module with open_clip's arguments.

    The gradients are scaled as with local_loss=True, gather_with_grad=True. gather_with_grad=False is rejected at
    world_size > 1, because its gradients are not exact: without local_loss the features' gradients are 1 / world_size
    of the exact ones, with it they lack the other ranks' terms. local_loss=False is accepted, because it changes only
    the value that a rank reports. cache_labels has no effect. A logit_bias has no effect either: it cancels in both
    softmaxes.

    Args:
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod: as in open_clip.loss.ClipLoss.
            world_size > 1 selects torch.distributed's WORLD; rank and world_size must match it.
        group: process group of the ring, instead of WORLD.
        duplicates, margin, options: as in `inf_cl_loss`.

    Raises:
        ValueError: use_horovod, inexact gradients, or a rank or world_size that differs from the group's.
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
        margin: float | None = None,
        options: RingOptions = DEFAULT_OPTIONS,
    ):
        if use_horovod:
            raise ValueError("use_horovod=True: the ring runs over torch.distributed only")
        if world_size > 1 and not gather_with_grad:
            raise ValueError(
                f"world_size {world_size} with gather_with_grad=False asks for gradients that are not the exact ones; "
                "pass local_loss=True, gather_with_grad=True"
            )
        super().__init__("inf_cl", group=group, duplicates=duplicates, margin=margin, options=options)
        self.over_all = _is_over_all(rank, world_size, group)


class SigLipLoss(ContrastiveLoss):
    """`siglip_loss` as a module with open_clip's arguments.

    dist_impl selects how open_clip's ranks exchange texts. It has no effect here: texts always travel around the ring.
    cache_labels has no effect either.

    Args:
        cache_labels, rank, world_size, dist_impl: as in open_clip.loss.SigLipLoss; rank and world_size as in InfCLLoss.
        group: process group of the ring, instead of WORLD.
        duplicates, margin, options: as in `siglip_loss`.

    Raises:
        ValueError: a rank or world_size that differs from the group's.
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
        margin: float | None = None,
        options: RingOptions = DEFAULT_OPTIONS,
    ):
        super().__init__("siglip", group=group, duplicates=duplicates, margin=margin, options=options)
        self.over_all = _is_over_all(rank, world_size, group)


def _is_over_all(rank: int, world_size: int, group: dist.ProcessGroup | None) -> bool:
    """Return whether the ring runs over WORLD. Raise ValueError unless rank and world_size match the group's."""
    if world_size <= 1 and rank == 0:
        return False
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"rank {rank}, world_size {world_size}: torch.distributed is not initialised")
    actual = dist.get_rank(group), dist.get_world_size(group)  # None means WORLD
    if actual != (rank, world_size):
        raise ValueError(f"rank {rank}, world_size {world_size}: the process group says {actual[0]}, {actual[1]}")
    return group is None
