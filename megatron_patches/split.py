"""Sharding of a parameter over tensor-parallel ranks: full value <-> this rank's shard.

    full value = `stacked` equal blocks along `dim`; a block = T equal pieces; shard = piece tp_rank of every block

stacked = 3 for open_clip's in_proj, which is q | k | v along dim 0: every rank takes its heads of each.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

ATTRIBUTE = "tensor_parallel_split"  # attribute of a parameter: its Split, which infcl.engine.state uses


@dataclass(frozen=True)
class Split:
    """How a parameter is sharded.

    Attributes:
        dim: the dimension that is cut.
        stacked: number of equal blocks along `dim`, each of which is cut.
        group: the tensor-parallel ranks, in the order of their pieces.
    """

    dim: int
    stacked: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard. No communication."""
        pieces = full.unflatten(self.dim, (self.stacked, self.size, -1))
        own = pieces.select(self.dim + 1, dist.get_rank(self.group))
        return own.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def full(self, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from all ranks' shards. Collective: one all-gather."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        pieces = [one.unflatten(self.dim, (self.stacked, -1)) for one in parts]
        return torch.stack(pieces, dim=self.dim + 1).flatten(self.dim, self.dim + 2)

    def full_shape(self, part: torch.Size) -> torch.Size:
        shape = list(part)
        shape[self.dim] *= self.size
        return torch.Size(shape)
