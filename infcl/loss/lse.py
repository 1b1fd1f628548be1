"""Merge log-sum-exps of parts into the log-sum-exp of the whole, and read a loss off them.

Tensors: row_lse, col_lse, matched [b], float32 (float64 when the features are).
"""

import torch
from torch import Tensor


def merge_lse(total: Tensor, part: Tensor) -> Tensor:
    """`log(exp(total) + exp(part))`, in place in `total` and returned.

    Computed as max + log1p(exp(-|difference|)): never overflows, never falls below either input, and -inf (an empty
    part) is the neutral element (Inf-CL, arXiv 2410.17243, Eq. 4, with the initial value -inf that it needs).
    """
    return torch.logaddexp(total, part, out=total)


def contrastive_loss_of(row_lse: Tensor, col_lse: Tensor, matched: Tensor) -> Tensor:
    """Mean over a rank's own rows and columns of `(cross entropy of the row + cross entropy of the column) / 2`.

    Each lse is at least the matched logit, so no term is negative. Returns a 0-dim tensor.
    """
    return (row_lse + col_lse).sub_(matched, alpha=2).mean() / 2
