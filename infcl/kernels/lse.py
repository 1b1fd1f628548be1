"""Log-sum-exp (LSE) over parts of a row: merge the parts, and compute the loss from them.

Row i has a matched logit s, and the LSE o over all other logits (the tiles exclude matches). Then

    cross entropy    log(exp(o) + exp(s)) - s = softplus(o - s)                 # l >= 0 in spite of rounding
    LSE of all       s + l
    dS at the match  exp(s) / (exp(o) + exp(s)) - 1 = expm1(-l)

l is a float32 function of the difference o - s. Late in training the match dominates the LSE of all, and subtracting
one from the other would cancel. The dominant entry of dS, at the match, is never rounded to half precision.

Tensors: LSE and matched logits [b], or [2, b] for rows and columns; float32 (float64 if the features are).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_lse(total: Tensor, part: Tensor) -> Tensor:
    """Compute `log(exp(total) + exp(part))` in place in `total`, and return it.

    Computed as max + log1p(exp(-|difference|)). It never overflows and is never below either input. -inf (an empty
    part) is the neutral element (Inf-CL, arXiv 2410.17243, Eq. 4, with the initial value -inf that it needs).

    Args:
        total, part: LSE of equal shape, float32 or wider.
    """
    return torch.logaddexp(total, part, out=total)


def cross_entropies(others_lse: Tensor, matched: Tensor) -> Tensor:
    """Return the losses l >= 0, [b] or [2, b] as `others_lse`; NaN where a matched logit is not finite.

    Args:
        others_lse: LSE over all logits except the match, [b] or [2, b], float32 or wider.
        matched: matched logits, [b].
    """
    difference = torch.sub(others_lse, matched).add_(matched, alpha=0)
    return F.softplus(difference, threshold=50)
