"""Linear layers of which every tensor-parallel rank computes a part.

    column   the rank has some of the output features: x copied in, each rank's own out    y_r = x W_r.T + b_r
    row      the rank has some of the input features: each rank's own in, summed out       y = sum_r x_r W_r.T + b

A pair column -> row costs one all-reduce in the forward and one in the backward. Under sequence parallelism the
tensors between such pairs are split over the ranks by their first dimension: an all-reduce becomes an all-gather and a
reduce-scatter, of as many bytes together, and the backward gathers the rows again instead of keeping them.

A row layer is megatron-core's mapping behind torch's product. A column layer's backward communicates while it computes
the weight's gradient, as megatron-core's LinearWithGradAccumulationAndAsyncCommunication does. That function is not
taken: under autocast its backward multiplies bfloat16 with float32, under sequence parallelism it needs CUDA, it adds
the bias in a pass of its own, and torch.compile cannot trace it (0.16.1). torch.compile takes a block of these layers
as one graph: what it communicates asynchronously are torch's functional collectives.

Shapes: n rows of any leading dimensions, T ranks; under sequence parallelism a rank has n / T of them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from infcl.towers.transformer import Attention, Linear

_collectives = torch.ops._c10d_functional  # in place of nothing, asynchronous until wait_tensor


@dataclass(frozen=True)
class Sharing:
    """How a layer is shared: the tensor-parallel group, and whether the rows around the layer are split too."""

    group: dist.ProcessGroup
    sequence_parallel: bool

    def __deepcopy__(self, memo: dict) -> "Sharing":
        return self  # a group is one object in a process


class Shared(Protocol):
    """What the parallel classes have beside their bases' attributes."""

    sharing: Sharing


class ColumnAttention(Attention):
    """Attention over this rank's heads; in_proj_weight [3 w / T, w], in_proj_bias [3 w / T]."""

    sharing: Sharing

    def project_in(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.in_proj_weight, self.in_proj_bias, self.sharing)


class ColumnLinear(Linear):
    """weight [out / T, in], bias [out / T]."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.weight, self.bias, self.sharing)


class RowLinear(Linear):
    """weight [out, in / T], bias [out], the same on every rank and added once."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        if self.sharing.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=self.sharing.group)
        else:
            y = reduce_from_tensor_model_parallel_region(y, group=self.sharing.group)
        return y + self.bias.to(y.dtype)


def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """This rank's output features of all rows: [n, out / T] from x [n, in] (sequence parallel: [n / T, in]).

    In autocast's dtype where that is on, so that what is sent has it too.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    size, name = dist.get_world_size(sharing.group), sharing.group.group_name
    return _Columns.apply(x, weight, bias, size, name, sharing.sequence_parallel)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, size, group_name, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.size, ctx.group_name, ctx.sequence_parallel = size, group_name, sequence_parallel
        if sequence_parallel:
            x = _collectives.wait_tensor(_collectives.all_gather_into_tensor(x.contiguous(), size, group_name))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad[:3]
        d_x = d_weight = d_bias = None
        if ctx.sequence_parallel and weight_needs:
            x = _collectives.all_gather_into_tensor(x.contiguous(), ctx.size, ctx.group_name)
        if x_needs:  # on the wire while the rest is computed
            d_x = d_y @ weight
            if ctx.sequence_parallel:
                d_x = _collectives.reduce_scatter_tensor(d_x, "sum", ctx.size, ctx.group_name)
            else:
                d_x = _collectives.all_reduce(d_x, "sum", ctx.group_name)
        if ctx.sequence_parallel and weight_needs:
            x = _collectives.wait_tensor(x)
        d_rows = d_y.flatten(0, -2)  # [n, out / T]
        if weight_needs:
            d_weight = d_rows.T @ x.flatten(0, -2)
        if bias_needs:
            d_bias = d_rows.sum(0)
        if x_needs:
            d_x = _collectives.wait_tensor(d_x)
        return d_x, d_weight, d_bias, None, None, None
