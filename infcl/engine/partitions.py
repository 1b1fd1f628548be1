"""The part of a parameter that a rank owns under ZeRO, and its position in the full parameter.

ZeRO passes flat tensors to the optimizer. A rank's flat tensor holds slices of some of its group's parameters:

    stage 0   each parameter is its own tensor, full on every rank
    1, 2      a rank's flat tensor is a slice of the concatenation of all the group's parameters
    3         a rank's flat tensor holds an equal slice of each parameter of a sub-group

state.py reads this layout from DeepSpeed. Optimizers that need rows, columns or norms of full parameters use it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """This rank's slice of a parameter. All ranks list the same parameters per tensor, in the same order.

    Attributes:
        name: the parameter's name.
        shape: the parameter's full shape.
        tensor: the tensor that the optimizer updates.
        offset: index of the slice in the flattened `tensor`.
        start: index of the slice in the flattened parameter.
        numel: length of the slice; 0 if this rank owns no element of the parameter.
    """

    name: str
    shape: torch.Size
    tensor: torch.Tensor
    offset: int
    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of `flat`, a tensor laid out like `self.tensor`: a view, [numel]."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    @property
    def rows(self) -> tuple[int, int]:
        """First index of dim 0 that the piece touches, and one past the last."""
        width = self.shape[1:].numel()
        return self.start // width, -(-(self.start + self.numel) // width)

    def lift(self, values: torch.Tensor) -> torch.Tensor:
        """Place the piece in the rows that it touches: [numel] -> [rows, *shape[1:]], with zeros elsewhere."""
        (first, end), width = self.rows, self.shape[1:].numel()
        lifted = values.new_zeros((end - first) * width)
        lifted.narrow(0, self.start - first * width, self.numel).copy_(values)
        return lifted.view(end - first, *self.shape[1:])

    def lower(self, lifted: torch.Tensor) -> torch.Tensor:
        """Undo `lift`: [rows, *shape[1:]] -> [numel]."""
        return lifted.reshape(-1).narrow(0, self.start - self.rows[0] * self.shape[1:].numel(), self.numel)
