"""Linear layers that are sharded over tensor-parallel ranks.

    column   the rank has a shard of the output features; x is replicated          y_r = x W_r.T + b_r
    row      the rank has a shard of the input features; the outputs are summed    y = sum_r x_r W_r.T + b

A column -> row pair costs one all-reduce in the forward and one in the backward. Under sequence parallelism the tensors
between such pairs are split over the ranks along their first dimension. An all-reduce becomes an all-gather and a
reduce-scatter with the same total bytes. The backward gathers the rows again instead of keeping them. Gradients of the
layers between the pairs are summed over the ranks.

A row layer is torch's GEMM followed by megatron-core's mapping. The backward of a column layer communicates while it
computes the weight's gradient, as megatron-core's LinearWithGradAccumulationAndAsyncCommunication does. That function
is not used, for four reasons (0.16.1): under autocast its backward multiplies bfloat16 with float32; under sequence
parallelism it needs CUDA; it adds the bias in a separate pass; torch.compile cannot trace it. torch.compile compiles a
block of the layers below into one graph, because they use torch's functional collectives.

Shapes: n rows of any leading dimensions, T ranks; under sequence parallelism a rank has n / T of the rows.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from infcl.models.transformer import Attention, LayerNorm, Linear

_collectives = torch.ops._c10d_functional  # out of place, asynchronous until _wait
_wait = _collectives.wait_tensor


@dataclass(frozen=True)
class Sharing:
    """How a layer is sharded: the tensor-parallel group, and whether the rows around the layer are split too."""

    group: dist.ProcessGroup
    sequence_parallel: bool

    @property
    def size_and_name(self) -> tuple[int, str]:
        """Size of the group, and its name in torch's operators."""
        return dist.get_world_size(self.group), self.group.group_name

    def __deepcopy__(self, memo: dict) -> "Sharing":
        return self  # a process group cannot be copied


class ColumnAttention(Attention):
    """Attention over this rank's heads; in_proj_weight [3 w / T, w], in_proj_bias [3 w / T]."""

    sharing: Sharing

    def project_in(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.in_proj_weight, self.in_proj_bias, self.sharing)


class ColumnLinear(Linear):
    """Linear layer with this rank's output features: weight [out / T, in], bias [out / T]."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return columns(x, self.weight, self.bias, self.sharing)


class RowLinear(Linear):
    """Linear layer with this rank's input features: weight [out, in / T], replicated bias [out], added once."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sharing.sequence_parallel:
            (bias,) = summed_gradients([self.bias], self.sharing)
            x, weight, bias = _in_autocast(x, self.weight, bias)
            return _ScatteredRows.apply(x, weight, *self.sharing.size_and_name) + bias
        y = F.linear(x, self.weight)
        y = reduce_from_tensor_model_parallel_region(y, group=self.sharing.group)
        return y + self.bias.to(y.dtype)


class SampleParallelNorm(LayerNorm):
    """LayerNorm of this rank's rows. Its parameters are replicated; the backward sums their gradients."""

    sharing: Sharing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = summed_gradients([self.weight, self.bias], self.sharing)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Return this rank's output features of all rows, [n, out / T], for x [n, in] (sequence parallel: [n / T, in])."""
    function = _GatheredColumns if sharing.sequence_parallel else _Columns
    return function.apply(*_in_autocast(x, weight, bias), *sharing.size_and_name)


def summed_gradients(parameters: list[torch.Tensor], sharing: Sharing) -> tuple[torch.Tensor, ...]:
    """Return the parameters; the backward sums their gradients over the ranks, in one message.

    Without gradients (pass 1, frozen blocks) this returns the parameters themselves: torch.compile breaks the graph at
    a function that returns views.
    """
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
        return tuple(parameters)
    return _SummedGradients.apply(sharing.group.group_name, *parameters)


def _in_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's dtype if autocast is on, so that messages have it too."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, size, group_name):
        ctx.save_for_backward(x, weight)
        ctx.group_name = group_name
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad[:3]
        d_x = d_weight = d_bias = None
        if x_needs:  # communicate while the other gradients are computed
            d_x = _collectives.all_reduce(d_y @ weight, "sum", ctx.group_name)
        d_rows = d_y.flatten(0, -2)  # [n, out / T]
        if weight_needs:
            d_weight = d_rows.T @ x.flatten(0, -2)
        if bias_needs:
            d_bias = d_rows.sum(0)
        if x_needs:
            d_x = _wait(d_x)
        return d_x, d_weight, d_bias, None, None


class _GatheredColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, size, group_name):
        ctx.save_for_backward(x, weight)  # own rows only: the backward gathers the others
        ctx.size_and_name = size, group_name
        return F.linear(_wait(_gather(x, size, group_name)), weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        # Gather while d_x is computed. A compiled block keeps the forward's gathered rows instead.
        gathering = _gather(x.flatten(0, -2), *ctx.size_and_name)
        d_x = _scatter_sum(d_y @ weight, *ctx.size_and_name)  # runs while d_weight is computed
        d_rows = d_y.flatten(0, -2)
        d_weight = d_rows.T @ _wait(gathering)
        return _wait(d_x), d_weight, d_rows.sum(0), None, None


class _ScatteredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, size, group_name):
        ctx.save_for_backward(x, weight)
        ctx.size_and_name = size, group_name
        return _wait(_scatter_sum(F.linear(x, weight), size, group_name))

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        d_y = _wait(_gather(d_y, *ctx.size_and_name))
        return d_y @ weight, d_y.flatten(0, -2).T @ x.flatten(0, -2), None, None


def _gather(rows: torch.Tensor, size: int, group_name: str) -> torch.Tensor:
    """Start an all-gather [n / T, ...] -> [n, ...]."""
    return _collectives.all_gather_into_tensor(rows.contiguous(), size, group_name)


def _scatter_sum(rows: torch.Tensor, size: int, group_name: str) -> torch.Tensor:
    """Start a reduce-scatter [n, ...] -> [n / T, ...]."""
    return _collectives.reduce_scatter_tensor(rows.contiguous(), "sum", size, group_name)


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group_name, *parameters):
        ctx.group_name = group_name
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx, *gradients):
        sums = _collectives.all_reduce_coalesced(list(gradients), "sum", ctx.group_name)
        return None, *(_wait(total) for total in sums)
