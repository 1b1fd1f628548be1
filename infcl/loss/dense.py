"""Baselines that store the logits: same call, same gradient scaling, matmuls in the features' dtype.

    clip        every rank gathers all features and computes the full matrix          [B, B]      2 all-gathers
    open_clip   local loss: own rows and own columns; autograd through the gather     2 x [b, B]  + 2 reduce-scatters
    disco       same loss; gradients computed in the forward, exchanged explicitly    2 x [b, B]  + 2 reduce-scatters

B = W * b. The mean of the ranks' gradients is the gradient of the global mean loss (see loss/inf_cl). For `clip` this
means that a rank's share of the full gradient is multiplied by W.
Sources: open_clip's ClipLoss (plain; --local-loss --gather-with-grad); DisCo-CLIP, arXiv 2304.08480, section 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl.loss.inputs import DEFAULT_OPTIONS, RingOptions, reject_double_backward, scalar_like, set_up
from infcl.parallel import all_gather, reduce_scatter


def dense_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    impl: str,
    group: dist.ProcessGroup | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the contrastive loss of the global batch from stored logits.

    Args:
        image_features, text_features, logit_scale, group: as in `inf_cl_loss`.
        options: only compare_ranks is used.

    Returns:
        The loss, 0-dim, float32 or wider: the same on every rank for "clip", else the mean over this rank's rows and
        columns.
    """
    set_up(impl, image_features, text_features, group, RingOptions(tile="torch", compare_ranks=options.compare_ranks))
    scale = scalar_like(image_features, logit_scale)
    _, rank = _world(group)
    labels = torch.arange(len(image_features), device=image_features.device) + rank * len(image_features)
    if impl == "disco":
        return _Disco.apply(image_features, text_features, scale, labels, group)
    all_images, all_texts = (_Gather.apply(side, group, impl) for side in (image_features, text_features))
    if impl == "clip":
        row_logits = (scale * all_images) @ all_texts.T  # [B, B]
        column_logits = row_logits.T
        labels = torch.arange(len(row_logits), device=row_logits.device)
    else:
        row_logits = (scale * image_features) @ all_texts.T  # [b, B]
        column_logits = (scale * text_features) @ all_images.T  # [b, B]
    return (_cross_entropy(row_logits, labels) + _cross_entropy(column_logits, labels)) / 2


class _Disco(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image_features, text_features, scale, labels, group):
        image_loss, d_images, d_all_texts, image_d_scale = _one_direction(
            image_features, text_features, scale, labels, group
        )
        text_loss, d_texts, d_all_images, text_d_scale = _one_direction(
            text_features, image_features, scale, labels, group
        )
        d_images += _reduce_scatter(d_all_images, group)
        d_texts += _reduce_scatter(d_all_texts, group)
        ctx.save_for_backward(d_images, d_texts, (image_d_scale + text_d_scale) / 2)
        return (image_loss + text_loss) / 2

    @staticmethod
    def backward(ctx, d_loss):
        reject_double_backward("disco")
        d_images, d_texts, d_scale = ctx.saved_tensors
        return (
            (d_images * (d_loss / 2)).to(d_images.dtype),
            (d_texts * (d_loss / 2)).to(d_texts.dtype),
            d_loss * d_scale,
            None,
            None,
        )


def _one_direction(
    queries: Tensor, keys: Tensor, scale: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cross entropy of own queries against all keys, and its gradients for queries, all keys and scale."""
    all_keys = _all_gather(keys, group)
    logits = ((scale * queries) @ all_keys.T).to(scale.dtype)  # [b, B]
    lse = logits.logsumexp(1, keepdim=True)
    own = torch.arange(len(queries), device=labels.device)
    loss = (lse.squeeze(1) - logits[own, labels]).mean()
    d_logits = logits.sub_(lse).exp_()
    d_logits[own, labels] -= 1
    d_logits = (d_logits / len(queries)).to(queries.dtype)
    d_queries = d_logits @ all_keys  # without the factor scale
    d_scale = (d_queries.to(scale.dtype) * queries).sum()
    return loss, scale * d_queries, scale * (d_logits.T @ queries), d_scale


class _Gather(torch.autograd.Function):
    """Gather all ranks' rows. Backward returns own rows' gradient: times W for "clip", else summed over ranks."""

    @staticmethod
    def forward(ctx, features, group, impl):
        ctx.group, ctx.rows, ctx.impl = group, len(features), impl
        return _all_gather(features, group)

    @staticmethod
    def backward(ctx, d_all):
        if ctx.impl != "clip":
            return _reduce_scatter(d_all, ctx.group), None, None
        world_size, rank = _world(ctx.group)
        return d_all[rank * ctx.rows : (rank + 1) * ctx.rows] * world_size, None, None


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy in float32 or wider, as autocast does."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _all_gather(features: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    world_size, _ = _world(group)
    if world_size == 1:
        return features.detach().view_as(features)
    gathered = features.new_empty(world_size * len(features), features.shape[1])
    all_gather(gathered, features.detach().contiguous(), group=group)
    return gathered


def _reduce_scatter(d_all: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return own rows [b, D] of the sum of d_all [B, D] over ranks."""
    world_size, _ = _world(group)
    if world_size == 1:
        return d_all
    own = d_all.new_empty(len(d_all) // world_size, d_all.shape[1])
    reduce_scatter(own, d_all.contiguous(), group=group)
    return own


def _world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
