"""A parameter that tensor-parallel ranks hold in parts: whole value <-> this rank's part.

    part = whole, cut along `dim` into `stacked` equal blocks, of each the tp_rank-th of T equal pieces

stacked = 3 for open_clip's in_proj, which is q | k | v along dim 0: every rank takes its heads of each.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

ATTRIBUTE = "tensor_parallel_split"  # on a parameter: its Split; infcl.engine.state reads and writes through it
_MARK = "tensor_model_parallel"  # on a parameter: the name that DeepSpeed's norm and clip, and Megatron's, look for


@dataclass(frozen=True)
class Split:
    """`group`: the tensor-parallel ranks, in the order of their pieces."""

    dim: int
    stacked: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, a copy. No communication."""
        pieces = whole.unflatten(self.dim, (self.stacked, self.size, -1))
        own = pieces.select(self.dim + 1, dist.get_rank(self.group))
        return own.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor from all ranks' parts. Collective: one all-gather."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        pieces = [one.unflatten(self.dim, (self.stacked, -1)) for one in parts]
        return torch.stack(pieces, dim=self.dim + 1).flatten(self.dim, self.dim + 2)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        shape = list(part)
        shape[self.dim] *= self.size
        return torch.Size(shape)


def split_parameter(module: nn.Module, name: str, split: Split) -> None:
    """Replace `module`'s parameter by this rank's part of it; marked, so that norms count every rank's part."""
    whole = getattr(module, name)
    part = nn.Parameter(split.part(whole.detach()), requires_grad=whole.requires_grad)
    setattr(part, _MARK, True)
    setattr(part, ATTRIBUTE, split)
    setattr(module, name, part)
