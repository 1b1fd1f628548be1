"""Entries of a block pair that are no plain negatives: those whose row and column share an id.

    same[i, j] = any(rows[k, i] == columns[k, j] for k in kinds)                # [r, c], never formed

Without weights these entries are left out of every sum. With weights they are positives: dS of the softmax loss has
(row_weights[i] + column_weights[j]) / 2 less there, the sigmoid loss has the sign +1.
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """ids: int32 of one or two kinds (of images, of texts); weights: float32 or wider, None leaves entries out."""

    rows: Tensor  # int32 [k, r]
    columns: Tensor  # int32 [k, c]
    row_weights: Tensor | None = None  # [r]: 1 / number of positives of the row
    column_weights: Tensor | None = None  # [c]

    def part(self, rows: slice, columns: slice) -> "Groups":
        """Those of some rows and columns of the block pair."""
        weights = self.row_weights, self.column_weights
        some = [None if w is None else w[side] for w, side in zip(weights, (rows, columns))]
        return Groups(self.rows[:, rows], self.columns[:, columns], *some)
