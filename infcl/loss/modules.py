"""Losses as modules, made and called like open_clip's.

    InfCLLoss    in place of open_clip.loss.ClipLoss
    SigLipLoss   in place of open_clip.loss.SigLipLoss

Either `group` says where the ring runs, or open_clip's arguments do: world_size > 1 means torch.distributed's WORLD, of
which they must be rank and size. `duplicates` is that of the functions, whose ids are arguments of a call.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from infcl.loss.inf_cl import inf_cl_loss
from infcl.loss.inputs import RingOptions
from infcl.loss.siglip import siglip_loss


class _Loss(nn.Module):
    """Where the ring runs, and how. duplicates: as of the function; options: fields of RingOptions."""

    def __init__(
        self, rank: int, world_size: int, group: dist.ProcessGroup | None, duplicates: str, options: dict[str, Any]
    ):
        super().__init__()
        RingOptions(**options)  # TypeError for an unknown one
        self.group, self.duplicates, self.options = group, duplicates, options
        self.over_all = (world_size > 1 or rank > 0) and group is None  # not the group itself: that cannot be copied
        if world_size > 1 or rank > 0:
            _check_rank(rank, world_size, group)

    def _options(self, image_ids: Tensor | None, text_ids: Tensor | None) -> dict[str, Any]:
        ids = {"image_ids": image_ids, "text_ids": text_ids, "duplicates": self.duplicates}
        return {**self.options, **ids, "group": dist.group.WORLD if self.over_all else self.group}


class InfCLLoss(_Loss):
    """`inf_cl_loss` as a module.

    The averages are those of local_loss=True, gather_with_grad=True. gather_with_grad=False at world_size > 1 is
    rejected, since it asks for other gradients than the exact ones (without local_loss features' gradients
    1 / world_size of them; with it, without the other ranks' terms). local_loss=False differs in what a rank reports,
    not in what data parallelism averages: accepted. cache_labels has nothing to cache.

    A logit_bias is accepted and changes nothing: a constant added to all logits cancels in both softmaxes.
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
        super().__init__(rank, world_size, group, duplicates, options)

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
        """The loss of `inf_cl_loss`, with output_dict as {"contrastive_loss": it}."""
        loss = inf_cl_loss(image_features, text_features, logit_scale, **self._options(image_ids, text_ids))
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(_Loss):
    """`siglip_loss` as a module.

    dist_impl says how open_clip's ranks exchange texts; here they always go round the ring, so it changes nothing.
    cache_labels has nothing to cache.
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
        super().__init__(rank, world_size, group, duplicates, options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float,
        output_dict: bool = False,
        *,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of `siglip_loss`, with output_dict as {"contrastive_loss": it}."""
        loss = siglip_loss(image_features, text_features, logit_scale, logit_bias, **self._options(image_ids, text_ids))
        return {"contrastive_loss": loss} if output_dict else loss


def _check_rank(rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
    """ValueError unless this process is this rank of so many in the group (None: WORLD)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"rank {rank}, world_size {world_size}: torch.distributed is not initialised")
    group = dist.group.WORLD if group is None else group
    actual = dist.get_rank(group), dist.get_world_size(group)
    if actual != (rank, world_size):
        raise ValueError(f"rank {rank}, world_size {world_size}: the process group says {actual[0]}, {actual[1]}")
