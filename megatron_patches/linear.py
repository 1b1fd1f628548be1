"""Linear layers that are sharded over tensor-parallel ranks.

    column   the rank has a shard of the output features; x is replicated          y_r = x W_r.T + b_r
    row      the rank has a shard of the input features; the outputs are summed    y = sum_r x_r W_r.T + b

A column -> row pair costs one all-reduce in the forward and one in the backward.

A row layer is torch's GEMM followed by megatron-core's mapping. The backward of a column layer communicates while it
computes the weight's gradient, as megatron-core's LinearWithGradAccumulationAndAsyncCommunication does. That function
is not used, for three reasons (0.16.1): under autocast its backward multiplies bfloat16 with float32; it adds the bias
in a separate pass; torch.compile cannot trace it. torch.compile compiles a block of the layers below into one graph,
because they use torch's functional collectives.

Shapes: n rows of any leading dimensions, T ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from infcl.models.transformer import Attention, Linear

_collectives = torch.ops._c10d_functional  # out of place, asynchronous until _wait
_wait = _collectives.wait_tensor


@dataclass(frozen=True)
class Sharing:
    """The tensor-parallel ranks among which a layer is sharded."""

    group: dist.ProcessGroup

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
        y = F.linear(x, self.weight)
        y = reduce_from_tensor_model_parallel_region(y, group=self.sharing.group)
        return y + self.bias.to(y.dtype)


def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Return this rank's output features, [n, out / T], for x [n, in]."""
    return _Columns.apply(*_in_autocast(x, weight, bias), sharing.group.group_name)


def _in_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's dtype if autocast is on, so that messages have it too."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group_name):
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
        return d_x, d_weight, d_bias, None
