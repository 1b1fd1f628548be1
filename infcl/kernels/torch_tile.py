"""One pair of feature blocks in plain PyTorch: the reference tile. Runs on any device, in float32 or float64.

In: r row features and c column features. Out: softmax statistics of their logits (forward), or feature gradients
(backward). The r x c logits are computed in chunks, in a workspace of bounded size.

    logits = scale * rows @ columns.T                                           # [r, c], chunk by chunk
    softmax: dS = (exp(logits - row_lse[:, None]) + exp(logits - col_lse)) / 2
    sigmoid: dS = sigmoid(logits + bias)
    d_rows = dS @ columns; d_columns = dS.T @ rows                              # without the factor scale
    d_scale = (dS * (rows @ columns.T)).sum()

Low-precision features are converted chunk by chunk, so every sum is float32 or wider.
Shapes: rows [r, D], columns [c, D]; scale, bias 0-dim; row statistics [r], column statistics [c].
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infcl.kernels.tile import Blocks, Gradients, Groups, Teacher

SUMMED_DIMS = 256  # feature dimensions summed at a time, which bounds the float32 temporaries
_ROWS = 16384  # rows per [rows, D] float32 temporary
_TEMPORARIES = 4  # maximum number of [chunk, chunk] tensors alive at once


def softmax_forward(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the LSE of rows and columns, `logits.logsumexp(1)` and `logits.logsumexp(0)`, float32 or wider.

    The entries of `groups` are excluded, except positives, which stay in the sums.
    """
    rows, columns = blocks[:2]
    row_lse = rows.new_full((len(rows),), -math.inf, dtype=_accumulator_like(rows))
    col_lse = rows.new_full((len(columns),), -math.inf, dtype=_accumulator_like(rows))
    for chunk in _chunks(blocks):
        for_rows, for_columns = chunk.counted(blocks, chunk.row_features @ chunk.column_features.T)
        part = row_lse[chunk.rows]
        torch.logaddexp(part, for_rows.logsumexp(1), out=part)
        part = col_lse[chunk.columns]
        torch.logaddexp(part, for_columns.logsumexp(0), out=part)
    return row_lse, col_lse


def softmax_backward(blocks: Blocks, row_lse: Tensor, col_lse: Tensor | None, gradients: Gradients) -> None:
    """Add dS @ columns, dS.T @ rows and <dS, rows @ columns.T> to the gradients.

    No probability exceeds one, so exponents are clamped at zero. Logits with large rounding errors (huge norms) would
    otherwise overflow.

    Args:
        blocks: the dS of positives is reduced as in Groups.
        row_lse, col_lse: LSE of the full batch, [r] and [c]. Without col_lse the loss is that of the rows only:
            dS = exp(logits - row_lse[:, None]).
        gradients: what to add to.
    """
    for chunk in _chunks(blocks):
        cosines = chunk.row_features @ chunk.column_features.T
        for_rows, for_columns = chunk.counted(blocks, cosines)
        d_logits = (for_rows - row_lse[chunk.rows, None]).clamp_(max=0).exp_()
        if col_lse is not None:
            d_logits += (for_columns - col_lse[chunk.columns]).clamp_(max=0).exp_()
            d_logits *= 0.5
        if blocks.groups is not None and blocks.groups.positive:
            assert blocks.groups.weights is not None, "positives have weights"
            d_logits -= blocks.groups.weights[chunk.rows, None] * chunk.sharing_an_id(blocks.groups)
        if blocks.masked:
            chunk.diagonal_of(d_logits).zero_()
        chunk.accumulate(d_logits, cosines, gradients)


def distill_gradients(
    blocks: Blocks, row_lse: Tensor, col_lse: Tensor, teacher: Teacher, gradients: Gradients
) -> Tensor:
    """Add to the gradients as softmax_backward does, with dS less the dS of the teacher, p.

    Returns:
        `(p * (teacher_logits - logits)).sum()`, 0-dim, float32 or wider.
    """
    divergence = torch.zeros_like(gradients.scale)
    for chunk in _chunks(blocks):
        cosines = chunk.row_features @ chunk.column_features.T
        given = [
            side.to(cosines.dtype) for side in (teacher.blocks.rows[chunk.rows], teacher.blocks.columns[chunk.columns])
        ]
        logits, wanted = cosines * blocks.scale, given[0] @ given[1].T * teacher.blocks.scale
        d_logits = _mean_of_softmaxes(logits, row_lse[chunk.rows, None], col_lse[chunk.columns])
        p = _mean_of_softmaxes(wanted, teacher.row_lse[chunk.rows, None], teacher.col_lse[chunk.columns])
        divergence += wanted.sub_(logits).mul_(p).sum()
        chunk.accumulate(d_logits.sub_(p), cosines, gradients)
    return divergence


def _mean_of_softmaxes(logits: Tensor, row_lse: Tensor, col_lse: Tensor) -> Tensor:
    """Return `((logits - row_lse).exp() + (logits - col_lse).exp()) / 2`; no probability exceeds one."""
    probabilities = (logits - row_lse).clamp_(max=0).exp_()
    return probabilities.add_((logits - col_lse).clamp_(max=0).exp_()).mul_(0.5)


def sigmoid_gradients(blocks: Blocks, bias: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Compute the losses, and add to the gradients as softmax_backward does, in one pass.

    Returns:
        `-logsigmoid(-(logits + bias)).sum()`, with the other sign at positives of `groups`, and the sum of dS (the
        bias's gradient), 0-dim, float32 or wider.
    """
    loss = blocks.rows.new_zeros((), dtype=_accumulator_like(blocks.rows))
    slope, groups = torch.zeros_like(loss), blocks.groups
    for chunk in _chunks(blocks):
        cosines = chunk.row_features @ chunk.column_features.T
        logits = torch.minimum(*chunk.counted(blocks, cosines)).add_(bias)
        signs = None
        if groups is not None and groups.positive:
            signs = 1 - 2 * chunk.sharing_an_id(groups).to(logits)
            logits *= signs
            if blocks.masked:  # the sign turned -inf
                chunk.diagonal_of(logits).fill_(-math.inf)
        loss += F.softplus(logits, threshold=50).sum()
        d_logits = logits.sigmoid_()
        if signs is not None:
            d_logits *= signs
        slope += d_logits.sum()
        chunk.accumulate(d_logits, cosines, gradients)
    return loss, slope


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return `(a * b).sum(1)`, [n], float32 or wider, without an [n, D] temporary."""
    chunks = zip(a.split(_ROWS), b.split(_ROWS))
    return torch.cat([torch.mul(x.to(_accumulator_like(x)), y).sum(1) for x, y in chunks])


def products_of_sums(
    rows: Tensor, columns: Tensor, row_order: Tensor, row_counts: Tensor, col_order: Tensor, col_counts: Tensor
) -> Tensor:
    """Return <sum of the rows of group n, sum of its columns> for each n, [groups], float32 or wider.

    Args:
        rows, columns: [r, D] and [c, D].
        row_order, row_counts: int64 indices that sort the rows by group, and the number of rows of each group. Rows
            past the sum of the counts are in no group. The same for columns.
    """
    totals = rows.new_zeros(len(row_counts), dtype=_accumulator_like(rows))
    for x, y in zip(rows.split(SUMMED_DIMS, 1), columns.split(SUMMED_DIMS, 1)):
        totals += torch.linalg.vecdot(segment_sums(x, row_order, row_counts), segment_sums(y, col_order, col_counts))
    return totals


def segment_sums(features: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the features [n, d] of each group, [groups, d], float32 or wider."""
    ordered = features[order].to(_accumulator_like(features))
    return torch.segment_reduce(ordered, "sum", lengths=counts, unsafe=True)


class _Chunk(NamedTuple):
    """Part of the block pair: slices of rows and columns, and their features in the accumulation dtype."""

    rows: slice
    columns: slice
    row_features: Tensor
    column_features: Tensor

    def diagonal_of(self, matrix: Tensor) -> Tensor:
        """Return a view of the entries (i, i) in a matrix of this chunk's shape; may be empty."""
        return matrix.diagonal(self.rows.start - self.columns.start)

    def sharing_an_id(self, groups: Groups) -> Tensor:
        """Return bool [height, width]: whether row and column share an id."""
        return groups.rows[self.rows, None] == groups.columns[self.columns]

    def counted(self, blocks: Blocks, cosines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits as they count for their rows and for their columns: -inf where they are left out.

        Every objective that leaves out entries, or changes their weights (by adding the logarithm), is defined here and
        for the kernels in triton_launch.counted. The two results may be one tensor.
        """
        logits = cosines * blocks.scale
        if blocks.masked:
            self.diagonal_of(logits).fill_(-math.inf)
        groups, limits = blocks.groups, blocks.limits
        if groups is not None and not groups.positive:
            logits.masked_fill_(self.sharing_an_id(groups), -math.inf)
        if limits is None:
            return logits, logits
        beyond = cosines > limits.rows[self.rows, None], cosines > limits.columns[self.columns]
        if groups is not None and groups.positive:
            negatives = ~self.sharing_an_id(groups)
            beyond = beyond[0] & negatives, beyond[1] & negatives
        return logits.masked_fill(beyond[0], -math.inf), logits.masked_fill(beyond[1], -math.inf)

    def accumulate(self, d_logits: Tensor, cosines: Tensor, gradients: Gradients) -> None:
        if gradients.rows is not None:
            gradients.rows[self.rows].addmm_(d_logits, self.column_features)
        if gradients.columns is not None:
            gradients.columns[self.columns].addmm_(d_logits.T, self.row_features)
        gradients.scale.add_(cosines.mul_(d_logits).sum())


def _chunks(blocks: Blocks) -> Iterator[_Chunk]:
    rows, columns = blocks.rows, blocks.columns
    dtype = _accumulator_like(rows)
    temporaries = _TEMPORARIES + (0 if blocks.limits is None else 3)
    elements = max(1, blocks.workspace_bytes // (temporaries * dtype.itemsize))
    height = min(len(rows), math.isqrt(elements))
    width = min(len(columns), elements // height)
    for i in range(0, len(rows), height):
        row_slice = slice(i, min(i + height, len(rows)))
        row_features = rows[row_slice].to(dtype)
        for j in range(0, len(columns), width):
            column_slice = slice(j, min(j + width, len(columns)))
            yield _Chunk(row_slice, column_slice, row_features, columns[column_slice].to(dtype))


def _accumulator_like(features: Tensor) -> torch.dtype:
    return torch.promote_types(features.dtype, torch.float32)
