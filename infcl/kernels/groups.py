"""Groups: entries of a block pair that are not plain negatives, because their row and column share an id.

    same[i, j] = any(rows[k, i] == columns[k, j] for k in kinds)                # [r, c], never formed

These entries are excluded from every sum, or they are positives. For positives the softmax's dS is reduced by
(row_weights[i] + column_weights[j]) / 2 (loss of the rows only: by row_weights[i]); the sigmoid has the sign +1.
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Ids of one or two kinds (images, texts), and the role of entries that share an id."""

    rows: Tensor  # int32 [k, r]
    columns: Tensor  # int32 [k, c]
    positive: bool = False
    row_weights: Tensor | None = None  # f32 or wider [r]: 1 / number of positives of the row; for the softmax's dS
    column_weights: Tensor | None = None  # [c], the same for columns; None: the loss of the rows only

    def part(self, rows: slice, columns: slice) -> "Groups":
        """Return the groups of some rows and columns of the block pair."""
        weights = self.row_weights, self.column_weights
        some = [None if w is None else w[side] for w, side in zip(weights, (rows, columns))]
        return Groups(self.rows[:, rows], self.columns[:, columns], self.positive, *some)
