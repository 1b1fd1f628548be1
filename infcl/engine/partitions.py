"""The part of a parameter that a rank owns: what ZeRO leaves of matrices, for those who must still see the matrix.

ZeRO hands an optimizer flat tensors; a rank's flat tensor holds slices of some of its group's parameters:

    stage 0   each parameter is its own tensor, whole on every rank
    1, 2      a rank's flat tensor is a slice of all the group's parameters, laid end to end
    3         a rank's flat tensor holds an equal slice of each parameter of a sub-group

state.py reads the layout off DeepSpeed; optimizers that need rows, columns or norms of whole parameters use it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened parameter lie at `offset` of the (flattened) `tensor`.

    tensor: what the optimizer steps with. numel is 0 where this rank owns nothing of the parameter. All ranks list the
    same parameters for corresponding tensors, in the same order.
    """

    name: str
    shape: torch.Size
    tensor: torch.Tensor
    offset: int
    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This piece of `flat`, a tensor laid out as `self.tensor` is: [numel], a view."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    @property
    def rows(self) -> tuple[int, int]:
        """First and one past the last index of dim 0 that the piece touches."""
        width = self.shape[1:].numel()
        return self.start // width, -(-(self.start + self.numel) // width)

    def lift(self, values: torch.Tensor) -> torch.Tensor:
        """[numel] -> [rows touched, *shape[1:]], zero where the piece has no element."""
        (first, end), width = self.rows, self.shape[1:].numel()
        lifted = values.new_zeros((end - first) * width)
        lifted.narrow(0, self.start - first * width, self.numel).copy_(values)
        return lifted.view(end - first, *self.shape[1:])

    def lower(self, lifted: torch.Tensor) -> torch.Tensor:
        """[rows touched, *shape[1:]] -> [numel]; undoes `lift`."""
        return lifted.reshape(-1).narrow(0, self.start - self.rows[0] * self.shape[1:].numel(), self.numel)


def sum_over(group: dist.ProcessGroup | None, sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor summed over the ranks of `group` (None: as they are), with one all-reduce.

    Offloaded tensors go through the GPU that the group communicates from.
    """
    if group is None or dist.get_world_size(group) == 1 or not sums:
        return sums
    joined = torch.cat([value.reshape(-1) for value in sums])
    on_group = joined.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(on_group, group=group)
    parts = on_group.to(joined.device).split([value.numel() for value in sums])
    return [part.view(value.shape) for part, value in zip(parts, sums)]
