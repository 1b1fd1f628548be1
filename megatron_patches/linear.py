"""Linear layers of which every tensor-parallel rank computes a part: megatron-core's mappings around torch's product.

    column   the rank has some of the output features: copy in, each rank's own out      y_r = x W_r.T + b_r
    row      the rank has some of the input features: each rank's own in, sum out        y = sum_r x_r W_r.T + b

A pair column -> row costs one all-reduce in the forward and one in the backward. Under sequence parallelism the
tensors between such pairs are split over the ranks by their first dimension: an all-reduce becomes an all-gather and a
reduce-scatter, of as many bytes together.

megatron-core's ColumnParallelLinear is not used as it is: under torch.autocast its backward multiplies bfloat16 with
float32 (0.16.1), and it keeps the whole weight's initialisation to itself.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from infcl.towers.transformer import Attention, Linear


def enter_columns(x: torch.Tensor, sequence_parallel: bool, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """What every rank's columns need: x itself, or all ranks' rows of it; backward: the ranks' gradients summed.

    Under autocast already in its dtype, so that what is sent is half as long.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, group=group)
    return copy_to_tensor_model_parallel_region(x, group=group)


class ColumnAttention(Attention):
    """Attention over this rank's heads; in_proj_weight [3 w / T, w], in_proj_bias [3 w / T]."""

    def project_in(self, x: torch.Tensor) -> torch.Tensor:
        return super().project_in(enter_columns(x, self.sequence_parallel, self.tp_group))


class ColumnLinear(Linear):
    """weight [out / T, in], bias [out / T]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(enter_columns(x, self.sequence_parallel, self.tp_group))


class RowLinear(Linear):
    """weight [out, in / T], bias [out], the same on every rank and added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        else:
            y = reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y + self.bias.to(y.dtype)
