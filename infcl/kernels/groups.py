"""Entries of a block pair that are no plain negatives: those whose row and column share an id.

    same[i, j] = any(rows[k, i] == columns[k, j] for k in kinds)                # [r, c], never formed

They are left out of every sum, or they are positives: the softmax's dS has (row_weights[i] + column_weights[j]) / 2
less there (the loss of the rows alone: row_weights[i]), the sigmoid has the sign +1.
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Ids of one or two kinds (of images, of texts), and what entries are that share one."""

    rows: Tensor  # int32 [k, r]
    columns: Tensor  # int32 [k, c]
    positive: bool = False
    row_weights: Tensor | None = None  # f32 or wider [r]: 1 / number of positives of the row; for the softmax's dS
    column_weights: Tensor | None = None  # [c]; None: the loss of the rows alone

    def part(self, rows: slice, columns: slice) -> "Groups":
        """Those of some rows and columns of the block pair."""
        weights = self.row_weights, self.column_weights
        some = [None if w is None else w[side] for w, side in zip(weights, (rows, columns))]
        return Groups(self.rows[:, rows], self.columns[:, columns], self.positive, *some)
