"""Log-sum-exps over parts of a row: merge them, and read its loss off them.

Row i has its matched logit s and o, the LSE over all others (the tiles leave matched pairs out). Then

    cross entropy    log(exp(o) + exp(s)) - s = softplus(o - s)                 # l >= 0, whatever is rounded
    LSE of all       s + l
    dS at the match  exp(s) / (exp(o) + exp(s)) - 1 = expm1(-l)

all in float32, of the difference: an LSE and the logit that dominates it do not cancel late in a training, and
the entry of dS that outweighs its row is never rounded to half precision.

Tensors: LSE and matched logits [b], or of rows and columns [2, b]; float32 (float64 when the features are).
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
    """The losses l of rows, each >= 0: [b] or [2, b] as `others_lse`. NaN where a matched logit is not finite."""
    difference = torch.sub(others_lse, matched).add_(matched, alpha=0)
    return F.softplus(difference, threshold=50)
