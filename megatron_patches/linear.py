"""Linear layers of which every tensor-parallel rank computes a part.

    column   the rank has some of the output features: x copied in, each rank's own out    y_r = x W_r.T + b_r
    row      the rank has some of the input features: each rank's own in, summed out       y = sum_r x_r W_r.T + b

A pair column -> row costs one all-reduce in the forward and one in the backward. Under sequence parallelism the
tensors between such pairs are split over the ranks by their first dimension: an all-reduce becomes an all-gather and a
reduce-scatter, of as many bytes together, and the backward gathers the rows again instead of keeping them.

A row layer is megatron-core's mapping behind torch's product. A column layer's backward communicates while it computes
the weight's gradient, as megatron-core's LinearWithGradAccumulationAndAsyncCommunication does. That function is not
taken: under autocast its backward multiplies bfloat16 with float32, under sequence parallelism it needs CUDA, and it
adds the bias in a pass of its own (0.16.1).

Shapes: n rows of any leading dimensions, T ranks; under sequence parallelism a rank has n / T of them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from infcl.towers.transformer import Attention, Linear


class ColumnAttention(Attention):
    """Attention over this rank's heads; in_proj_weight [3 w / T, w], in_proj_bias [3 w / T]."""

    def project_in(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.in_proj_weight, self.in_proj_bias, self.tp_group, self.sequence_parallel)


class ColumnLinear(Linear):
    """weight [out / T, in], bias [out / T]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.weight, self.bias, self.tp_group, self.sequence_parallel)


class RowLinear(Linear):
    """weight [out, in / T], bias [out], the same on every rank and added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _sum_over_ranks(F.linear(x, self.weight), self.tp_group, self.sequence_parallel)
        return y + self.bias.to(y.dtype)


@torch.compiler.disable
def columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> torch.Tensor:
    """This rank's output features of all rows: [n, out / T] from x [n, in] (sequence parallel: [n / T, in]).

    In autocast's dtype where that is on, so that what is sent has it too.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return _Columns.apply(x, weight, bias, group, sequence_parallel)


@torch.compiler.disable
def _sum_over_ranks(y: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> torch.Tensor:
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(y, group=group)
    return reduce_from_tensor_model_parallel_region(y, group=group)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if sequence_parallel:
            x, gathering = _gather_rows(x, group)
            gathering.wait()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad[:3]
        own, d_x, sending = x, None, None
        if ctx.sequence_parallel and weight_needs:
            x, gathering = _gather_rows(x, ctx.group)
        if x_needs:
            d_x, sending = _start_sum(d_y @ weight, own, ctx.group, ctx.sequence_parallel)
        if ctx.sequence_parallel and weight_needs:
            gathering.wait()
        d_rows = d_y.flatten(0, -2)  # [n, out / T]
        d_weight = d_rows.T @ x.flatten(0, -2) if weight_needs else None
        d_bias = d_rows.sum(0) if bias_needs else None
        if sending is not None:
            sending.wait()
        return d_x, d_weight, d_bias, None, None


def _gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    gathered = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    return gathered, dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)


def _start_sum(
    d_x: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[torch.Tensor, dist.Work]:
    """The sum over ranks of d_x (sequence parallel: this rank's rows of it, shaped as `own`), when the work is done."""
    if not sequence_parallel:
        return d_x, dist.all_reduce(d_x, group=group, async_op=True)
    summed = torch.empty_like(own, memory_format=torch.contiguous_format)
    return summed, dist.reduce_scatter_tensor(summed, d_x, group=group, async_op=True)
