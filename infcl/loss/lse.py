"""Log-sum-exps over parts of a row: merge them, and read its loss and its match's gradient off them.

Row i has its matched logit s and o, the LSE over all others (the tiles leave matched pairs out). Then

    cross entropy    log(exp(o) + exp(s)) - s = softplus(o - s)                 # >= 0 whatever is rounded
    dS at the match  exp(s) / (exp(o) + exp(s)) - 1 = -sigmoid(o - s)

Both in float32, of the difference: an LSE and the logit that dominates it do not cancel where pairs are told apart,
and the entry of dS that outweighs its row never passes through 16 bits.

Tensors: LSE and matched logits [b], float32 (float64 when the features are).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_lse(total: Tensor, part: Tensor) -> Tensor:
    """`log(exp(total) + exp(part))`, in place in `total` and returned.

    Computed as max + log1p(exp(-|difference|)): never overflows, never falls below either input, and -inf (an empty
    part) is the neutral element (Inf-CL, arXiv 2410.17243, Eq. 4, with the initial value -inf that it needs).
    """
    return torch.logaddexp(total, part, out=total)


def cross_entropies(others_lse: Tensor, matched: Tensor) -> Tensor:
    """The losses of rows from the LSE over their other columns and their matched logits, [b], each >= 0."""
    return -F.logsigmoid(matched - others_lse)


def matched_slopes(others_lse: Tensor, matched: Tensor) -> Tensor:
    """dS at the matches, [b], within [-1, 0]."""
    return -torch.sigmoid(others_lse - matched)
