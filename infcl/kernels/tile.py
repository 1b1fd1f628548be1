"""What a tile takes: a pair of feature blocks, the entries that are no plain negatives, and accumulators of gradients.

Shapes: rows [r, D], columns [c, D].
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Entries of a block pair that are not plain negatives, because their row and column share an id.

        same[i, j] = rows[i] == columns[j]                                      # [r, c], never formed

    These entries are excluded from every sum, or they are positives. For positives the softmax's dS is reduced by
    weights[i], which is also the weight of column j because their ids are equal; the sigmoid has the sign +1.
    """

    rows: Tensor  # int32 [r], ids
    columns: Tensor  # int32 [c]
    positive: bool = False
    weights: Tensor | None = None  # f32 or wider [r]: 1 / number of positives of the row; for the softmax's dS

    def part(self, rows: slice, columns: slice) -> "Groups":
        """Return the groups of some rows and columns of the block pair."""
        weights = None if self.weights is None else self.weights[rows]
        return Groups(self.rows[rows], self.columns[columns], self.positive, weights)


class Limits(NamedTuple):
    """Largest cosine of an entry that counts for its row, and for its column; `rows @ columns.T` above it is left out.

    Positives of groups are never left out. A sigmoid has one term for an entry, which either limit leaves out.
    """

    rows: Tensor  # f32 or wider [r]
    columns: Tensor  # [c]

    def part(self, rows: slice, columns: slice) -> "Limits":
        """Return the limits of some rows and columns of the block pair."""
        return Limits(self.rows[rows], self.columns[columns])


class Blocks(NamedTuple):
    """A pair of feature blocks, and how a tile computes with it.

    Attributes:
        rows, columns, scale: [r, D], [c, D] and 0-dim.
        masked: exclude the entries (i, i), i < min(r, c): those of matches, which the losses add in float32 (reason in
            loss/inf_cl).
        workspace_bytes: limit of temporary memory.
        groups: further entries that are not plain negatives: excluded, or positives.
        limits: exclude the entries above them.
        tf32: multiply float32 features in tf32.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor
    masked: bool
    workspace_bytes: int
    groups: Groups | None = None
    limits: Limits | None = None
    tf32: bool = False


class Teacher(NamedTuple):
    """Another pair of feature blocks of the same samples, whose probabilities the softmax shall have."""

    blocks: Blocks  # of another width
    row_lse: Tensor  # f32 or wider [r], of the full batch
    col_lse: Tensor  # [c]


class Gradients(NamedTuple):
    """Accumulators of a tile, float32 or wider, updated in place; None skips one."""

    rows: Tensor | None  # [r, D], without the factor scale
    columns: Tensor | None  # [c, D]
    scale: Tensor  # 0-dim
