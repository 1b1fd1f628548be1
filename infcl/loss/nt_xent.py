"""NT-Xent (SimCLR, SimCSE): all views against all views, without self-similarity.

In: two views [b, D] of this rank's samples. Out: the loss; backward gives the gradients. With z all 2 W b views:

    logits = scale * z @ z.T; logits.fill_diagonal_(-inf)                       # [2Wb, 2Wb], never formed
    loss = cross_entropy(logits, index of each view's other view)

This is Inf-CL's loss with the views as rows, and as columns in the order (second, first). A view's match is then its
other view; ids exclude its own entry. Rows and columns are the same views, so the losses of both directions are equal.
32 W b^2 D flops per rank; twice Inf-CL's bytes around the ring. Gradient scaling as in loss/inf_cl.
Source: SimCLR, arXiv 2002.05709, Eq. 1; scale is its 1 / temperature.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.loss.duplicates import find_duplicates
from infcl.loss.inf_cl import InfCL
from infcl.loss.inputs import DEFAULT_OPTIONS, RingOptions, outside_graphs, scalar_like, set_up


@outside_graphs
def nt_xent_loss(
    first_views: Tensor,
    second_views: Tensor,
    logit_scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the mean over this rank's 2b views of the cross entropy against all ranks' views.

    Args:
        first_views, second_views: [b, D]; row i of both is the same sample.
        logit_scale, group, options: as in `inf_cl_loss`.

    Returns:
        The loss, 0-dim, float32 or wider.

    Raises:
        ValueError: as in `inf_cl_loss`.
    """
    setup = set_up("nt_xent", first_views, second_views, group, options)
    rank = 0 if setup.group is None else dist.get_rank(setup.group)
    views, others = torch.cat([first_views, second_views]), torch.cat([second_views, first_views])  # [2b, D]
    own = torch.arange(rank * len(views), (rank + 1) * len(views), device=views.device)
    setup = setup._replace(duplicates=find_duplicates(own, own.roll(len(first_views)), "mask"))
    return InfCL.apply(views, others, scalar_like(views, logit_scale), setup)
