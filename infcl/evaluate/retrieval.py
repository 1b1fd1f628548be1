"""Image-text retrieval with several captions per image: exact counts, computed by all ranks in linear memory.

Each query has one right candidate. For a caption this is its image; for an image, the best-scoring of its own captions
(its other captions are ignored). Two counts describe a query: the wrong candidates that score higher than the right one
(`higher`), and those with an equal score (`ties`). Recall at k is the expected hit when ties are ordered at random,
clamp((k - higher) / (ties + 1), 0, 1). A collapsed model, whose features are all equal, therefore scores at chance.

One pass over the scores serves both directions, as in the loss. Images stay on their rank; captions move around the
ring with their right score and their counts; one [T, T] tile of scores exists at a time. The right scores are computed
in tiles of the same shape: the same GEMM gives equal features bitwise equal scores.

Shapes: n images and t captions of this rank, N in total, W ranks, D embedding width, T tile.
Cost: N_images * N_captions * 2 D FLOPs over all ranks (plus T/N of that for the right scores); W hops of t*D f32.
Memory per rank: 3 blocks of captions [t, D], this rank's images [n, D], and 2 T^2 f32.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl.evaluate.features import gather_rows, in_step, keys_of, share_equal
from infcl.loss.matryoshka import prefix
from infcl.loss.ring import RingExchange

RECALLS = (1, 5, 10)
_ALIGN = 64  # tile sides are multiples of it, so that all GEMMs take the same code path


class Features(NamedTuple):
    """Encoded samples of a rank. Captions are in the order of their images."""

    images: torch.Tensor  # f32 [n, D], unit norm
    texts: torch.Tensor  # f32 [t, D], unit norm
    owner: torch.Tensor  # int64 [t]: the row of `images` that a caption describes
    scalars: dict[str, torch.Tensor]  # logit_scale [1], log-space; logit_bias [1] where the model has one

    def prefix(self, width: int) -> "Features":
        """Return the features of the first `width` dimensions, of unit norm (loss/matryoshka)."""
        return self._replace(images=prefix(self.images, width), texts=prefix(self.texts, width))


def encode_pairs(
    encode: Callable[..., dict[str, torch.Tensor]],
    batches: Iterable[tuple[torch.Tensor, ...]],
    filler: tuple[torch.Tensor, ...],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Features:
    """Encode this rank's batches. Equal images, and equal texts, get the same features bit for bit.

    Collective: all ranks run the same number of forwards.

    Args:
        encode: see tasks.Task.run.
        batches: (images [m, ...], tokens [sum of captions, L], captions per image int64 [m]).
        filler: such a batch, for ranks that run out early.

    Raises:
        ValueError: no rank has an image with a caption.
    """
    rows, output = [], {}
    for (images, texts, captions), is_real in in_step(batches, filler, group, device):
        with torch.no_grad():
            output = encode(images.to(device, non_blocking=True), texts)
        keys = keys_of(images).to(device), keys_of(texts).to(device)
        batch = output["image_features"].float(), output["text_features"].float(), captions.to(device), *keys
        rows.append(batch if is_real else [of_filler[:0] for of_filler in batch])
    if not rows:
        raise ValueError("retrieval found no image with a caption")
    images, texts, captions, image_keys, text_keys = (torch.cat(column) for column in zip(*rows))
    images, texts = share_equal(images, image_keys, group), share_equal(texts, text_keys, group)
    owner = torch.repeat_interleave(torch.arange(len(images), device=device), captions)
    scalars: dict[str, torch.Tensor] = {name: output[name] for name in ("logit_scale", "logit_bias") if name in output}
    return Features(images, texts, owner, scalars)


def retrieval_metrics(features: Features, *, group: dist.ProcessGroup | None, tile: int = 4096) -> dict[str, float]:
    """Compute recalls and median ranks over the features of all ranks.

    Returns:
        {image_to_text, text_to_image}_{r1, r5, r10, median_rank}, num_samples and num_captions. The rank of a query is
        1 + higher + ties / 2, its mean when ties are ordered at random.
    """
    own = retrieval_counts(features.images, features.texts, features.owner, group=group, tile=tile)
    metrics: dict[str, float] = {}
    for name, query, own_counts in zip(("image_to_text", "text_to_image"), ("samples", "captions"), own):
        higher, ties = gather_rows(own_counts, group).unbind(1)
        metrics[f"num_{query}"] = len(higher)
        for k in RECALLS:
            metrics[f"{name}_r{k}"] = float(((k - higher) / (ties + 1)).clamp(0, 1).mean())
        ranks = 1 + higher + ties / 2
        median = float(ranks.median() - (-ranks).median()) / 2  # torch.median returns the lower of two
        metrics[f"{name}_median_rank"] = median
    return metrics


@torch.no_grad()
def retrieval_counts(
    images: torch.Tensor,
    texts: torch.Tensor,
    owner: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    tile: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the wrong candidates of all ranks that score higher than the right one, and those that tie with it.

    Plain PyTorch, on one rank:
        scores = images @ texts.T;  own = arange(n)[:, None] == owner
        right = scores.where(own, -inf).amax(1);  wrong = scores.where(~own, -inf)
        of_images = stack([(wrong > right[:, None]).sum(1), (wrong == right[:, None]).sum(1)], 1)
        of_texts: the same with right = scores[owner, arange(t)] and sums over dim 0

    Args:
        images: f32 [n, D]; every image needs a caption.
        texts: f32 [t, D].
        owner: int64 [t], the row of `images` that a caption describes.
        group: ranks of the ring; None: this rank only.
        tile: largest tile side T.

    Returns:
        Columns (higher, ties) of the images, f64 [n, 2], and of the captions, f64 [t, 2].
    """
    device, n, t = images.device, len(images), len(texts)
    ring = RingExchange(group)
    sizes = gather_rows(torch.tensor([[n, t]], device=device), group).tolist()  # of every rank
    tile = min(_round_up(tile, _ALIGN), _round_up(max(max(pair) for pair in sizes), _ALIGN))
    capacity = [_round_up(max(column), tile) for column in zip(*sizes)]  # rows and columns, the same on every rank
    images, texts = _padded(images.float(), capacity[0]), _padded(texts.float(), capacity[1])

    own_text = _right_scores(images, texts, owner, tile)  # [capacity 1]
    own_image = images.new_full((capacity[0],), -torch.inf)
    own_image.scatter_reduce_(0, owner, own_text[:t], "amax")
    of_images = torch.zeros(2, capacity[0], dtype=torch.float64, device=device)
    chunks = owner.cpu().split(tile) if t else ()
    spans = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]  # images of a column of tiles
    rank = 0 if group is None else dist.get_rank(group)
    for hop, (block, block_right) in ring.blocks(texts, own_text):
        columns = sizes[(rank - hop) % ring.world_size][1]
        of_texts = torch.zeros(2, capacity[1], dtype=torch.float64, device=device)
        for top in range(0, n, tile):
            for left in range(0, columns, tile):
                scores = images[top : top + tile] @ block[left : left + tile].T  # [T, T] f32
                if hop == 0 and spans[left // tile][0] < top + tile and spans[left // tile][1] >= top:
                    _hide_own(scores, owner, top, left)
                scores = scores[: n - top, : columns - left]
                rows, cols = slice(top, top + len(scores)), slice(left, left + scores.shape[1])
                _count(scores, own_image[rows, None], 1, of_images[:, rows])
                _count(scores, block_right[None, cols], 0, of_texts[:, cols])
        ring.carry("of_texts", hop, of_texts, torch.Tensor.add_)
    of_texts = ring.home("of_texts", torch.Tensor.add_)
    return of_images[:, :n].T.contiguous(), of_texts[:, :t].T.contiguous()


def _count(scores: torch.Tensor, right: torch.Tensor, dim: int, into: torch.Tensor) -> None:
    """into += [(scores > right).sum(dim), (scores == right).sum(dim)].

    Signs are much faster than booleans on a CPU. The sign of a float32 difference is exact, and so are sums of signs
    below 2^24. A hidden score of -inf adds nothing.
    """
    signs = (scores - right).sign_()
    above_minus_below = signs.sum(dim)
    unequal = signs.abs_().sum(dim)
    into[0] += (unequal + above_minus_below) / 2
    into[1] += scores.shape[dim] - unequal


def _right_scores(images: torch.Tensor, texts: torch.Tensor, owner: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the scores of captions with their own images, [len(texts)]; +inf for padding, so that nothing beats it."""
    right = texts.new_full((len(texts),), torch.inf)
    for left in range(0, len(owner), tile):
        mine = owner[left : left + tile]
        paired = _padded(images[mine], tile)  # [T, D]
        right[left : left + len(mine)] = (paired @ texts[left : left + tile].T).diagonal()[: len(mine)]
    return right


def _hide_own(scores: torch.Tensor, owner: torch.Tensor, top: int, left: int) -> None:
    """Set the scores of captions with their own images in this tile to -inf, in place."""
    row = owner[left : left + scores.shape[1]] - top
    column = torch.arange(len(row), device=row.device)
    inside = (row >= 0) & (row < len(scores))
    scores[row[inside], column[inside]] = -torch.inf


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Pad [k, D] with zeros to a contiguous [length, D]."""
    return rows.contiguous() if len(rows) == length else F.pad(rows, (0, 0, 0, length - len(rows)))
