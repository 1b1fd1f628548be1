"""Shard ordinary towers over tensor-parallel ranks, in place.

In every residual block the attention heads and the hidden features of the MLP are sharded. Norms, embeddings,
projections and output biases are replicated on every rank (2-6% of the parameters). The layers get other classes and
their parameters are sharded, so the state dict keeps its names and the tower files need no change.

Replicated parameters must stay equal on all tensor-parallel ranks. They start equal (same seed), and every rank
computes their gradients from the same numbers. Gradients of convolutions are averaged over the group, because cuDNN may
sum in another order on each rank.

Random choices (patch dropout) are drawn outside the blocks, from a generator that is seeded by the data-parallel rank,
so tensor-parallel ranks drop the same patches.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from infcl.models.clip import CLIP
from infcl.models.transformer import ResidualBlock
from megatron_patches.linear import ColumnAttention, ColumnLinear, RowLinear, Sharing
from megatron_patches.split import ATTRIBUTE, Split

_COUNTED = "tensor_model_parallel"  # attribute of a parameter: the norms of DeepSpeed and Megatron count every shard


def split_towers(model: CLIP, group: dist.ProcessGroup) -> None:
    """Shard `model` in place. Call it before deepspeed.initialize.

    Args:
        model: full and equal on the ranks of `group`.
        group: the tensor-parallel ranks.
    """
    model.cfg.check_divides(dist.get_world_size(group))
    sharing = Sharing(group)
    for tower in model.transformers.values():
        for block in cast(Any, tower.resblocks):
            _split_block(block, sharing)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            for parameter in module.parameters(recurse=False):
                _average_gradient(parameter, group)


def _split_block(block: ResidualBlock, sharing: Sharing) -> None:
    heads, rows, columns = (Split(dim, stacked, sharing.group) for dim, stacked in ((0, 3), (0, 1), (1, 1)))
    for owner, name, split in (
        (block.attn, "in_proj_weight", heads),
        (block.attn, "in_proj_bias", heads),
        (block.attn.out_proj, "weight", columns),
        (block.mlp.c_fc, "weight", rows),
        (block.mlp.c_fc, "bias", rows),
        (block.mlp.c_proj, "weight", columns),
    ):
        full = getattr(owner, name)
        part = nn.Parameter(split.part(full.detach()), requires_grad=full.requires_grad)
        setattr(part, ATTRIBUTE, split)
        setattr(part, _COUNTED, True)
        setattr(owner, name, part)
    _switch(block.attn, ColumnAttention, sharing)
    _switch(block.attn.out_proj, RowLinear, sharing)
    _switch(block.mlp.c_fc, ColumnLinear, sharing)
    _switch(block.mlp.c_proj, RowLinear, sharing)


def _switch(module: nn.Module, parallel_class: type[nn.Module], sharing: Sharing) -> None:
    module.__class__ = parallel_class
    module.sharing = sharing  # type: ignore[assignment]


def _average_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Average the parameter's gradient over the group in every backward, before it is accumulated."""
    if not parameter.requires_grad:
        return

    def average(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=group)
        return gradient / dist.get_world_size(group)

    parameter.register_hook(average)
