"""Ordinary towers -> towers of which this rank holds its part, in place.

In every residual block the heads of attention and the hidden features of the MLP are shared out; norms, embeddings,
projections and the output biases stay whole on every rank (2-6% of the parameters). The classes of the layers are
switched and their parameters cut, so the state dict keeps its names, and the tower files know nothing of it.

Parameters that stay whole must stay equal on all tensor-parallel ranks. They start equal (same seed), and every rank
computes their gradients from the same numbers, except two kinds, whose gradients are reduced over the group as they
come: convolutions (cuDNN may sum in another order on each rank) and, under sequence parallelism, what is between the
split layers (each rank sees its own rows only).

Random choices (patch dropout) are drawn outside the blocks from a generator that is seeded by the data-parallel rank,
so tensor-parallel ranks drop the same patches.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn

from infcl.models.clip import CLIP
from infcl.models.config import check_divides
from infcl.models.transformer import ResidualBlock, Transformer
from megatron_patches.linear import ColumnAttention, ColumnLinear, RowLinear, SampleParallelNorm, Shared, Sharing
from megatron_patches.split import ATTRIBUTE, Split, split_parameter


def split_towers(model: CLIP, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
    """Cut `model`, whole and equal on the ranks of `group`, into this rank's part. Before deepspeed.initialize.

    Blocks may have been cut already (`cut_block`), one by one as they were made.

    sequence_parallel: between the split layers each rank keeps 1 / T of a micro-batch's samples only.
    """
    check_divides(model.cfg, dist.get_world_size(group))
    sharing = Sharing(group, sequence_parallel)
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            _split_block(module, sharing)
        elif isinstance(module, Transformer) and sequence_parallel:
            _switch(module, SampleParallelTransformer, sharing)
        elif isinstance(module, nn.Conv2d):
            for parameter in module.parameters(recurse=False):
                _average_gradient(parameter, group)


class SampleParallelTransformer(Transformer):
    """[m, L, w] -> [m, L, w], whole on every rank; between its split layers each rank has m / T samples.

    Megatron cuts its [L, m, w] along L. The first dimension here is the sample, which divides by T where 257 tokens do
    not; the tokens of a sample meet only in attention, which has all of them.
    """

    sharing: Sharing

    def forward(
        self, x: torch.Tensor, begin: int = 0, end: int | None = None, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, group = len(x), self.sharing.group
        size = dist.get_world_size(group)
        padding = -rows % size  # the last batch of an evaluation, packed captions
        if seen is not None:
            padding = max(padding, 2 * size - rows)  # compiled code takes 1 row for a case apart
        if seen is not None and seen.dtype == torch.bool:
            # Attention has all ranks' rows; in those that fill up tokens attend to all: a softmax over none is nan.
            seen = F.pad(seen, (0, 0, 0, 0, 0, 0, 0, padding), value=True)
        x = scatter_to_sequence_parallel_region(F.pad(x, (0, 0, 0, 0, 0, padding)), group=group)
        x = super().forward(x, begin, end, seen)
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)[:rows]


def cut_block(block: ResidualBlock, group: dist.ProcessGroup) -> None:
    """Leave `block` this rank's part of its parameters, unless that is done; it cannot run before `split_towers`."""
    heads, rows, columns = (Split(dim, stacked, group) for dim, stacked in ((0, 3), (0, 1), (1, 1)))
    for owner, name, split in (
        (block.attn, "in_proj_weight", heads),
        (block.attn, "in_proj_bias", heads),
        (block.attn.out_proj, "weight", columns),
        (block.mlp.c_fc, "weight", rows),
        (block.mlp.c_fc, "bias", rows),
        (block.mlp.c_proj, "weight", columns),
    ):
        if not hasattr(getattr(owner, name), ATTRIBUTE):
            split_parameter(owner, name, split)


def _split_block(block: ResidualBlock, sharing: Sharing) -> None:
    cut_block(block, sharing.group)
    classes: list[tuple[nn.Module, type[nn.Module]]] = [
        (block.attn, ColumnAttention),
        (block.attn.out_proj, RowLinear),
        (block.mlp.c_fc, ColumnLinear),
        (block.mlp.c_proj, RowLinear),
    ]
    if sharing.sequence_parallel:
        classes += [(block.ln_1, SampleParallelNorm), (block.ln_2, SampleParallelNorm)]
    for module, parallel_class in classes:
        _switch(module, parallel_class, sharing)


def _switch(module: nn.Module, parallel_class: type[nn.Module], sharing: Sharing) -> None:
    module.__class__ = parallel_class
    cast(Shared, module).sharing = sharing


def _average_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Over the group, in every backward, before anything accumulates it."""
    if not parameter.requires_grad:
        return

    def average(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=group)
        return gradient / dist.get_world_size(group)

    parameter.register_hook(average)
