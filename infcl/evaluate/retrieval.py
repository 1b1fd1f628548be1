"""Image<->text retrieval: recall@k and median rank over an evaluation set, all ranks working, no N x N matrix held.

The i-th image and the i-th text belong together. The rank of a query is 1 + the number of candidates that score higher
than its partner; candidates that score *equal* to the partner count half, so that a collapsed model (all features
equal) gets chance and not recall 1.

Shapes: N samples in all, n of them this rank's queries, D embedding width; [chunk, N] scores are held at a time.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from infcl.evaluate.features import gather_rows, in_step


def evaluate_retrieval(
    encode: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    filler: tuple[torch.Tensor, torch.Tensor],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    chunk: int = 1024,
) -> dict[str, float]:
    """Metrics over all ranks' samples: {image,text}_to_{text,image}_{r1,r5,r10,median_rank}, num_samples.

    encode   (uint8 images [m, 3, H, W], tokens [m, L]) -> dict with unit-norm f32 features [m, D]
    batches  this rank's samples; `filler` is a batch of the same kind for ranks that run out early
    """
    image_rows, text_rows = [], []
    for (images, texts), is_real in in_step(batches, filler, group, device):
        with torch.no_grad():
            output = encode(images.to(device, non_blocking=True), texts.to(device, non_blocking=True))
        if is_real:
            image_rows.append(output["image_features"].float())
            text_rows.append(output["text_features"].float())
    width = output["image_features"].shape[1]
    own_images = torch.cat(image_rows) if image_rows else torch.zeros(0, width, device=device)  # [n, D]
    own_texts = torch.cat(text_rows) if text_rows else torch.zeros(0, width, device=device)
    all_images, start = gather_rows(own_images, group)  # [N, D]
    all_texts, _ = gather_rows(own_texts, group)
    partner = torch.arange(start, start + len(own_images), device=device)
    directions = {
        "image_to_text": retrieval_ranks(own_images, all_texts, partner, chunk),
        "text_to_image": retrieval_ranks(own_texts, all_images, partner, chunk),
    }
    metrics: dict[str, float] = {"num_samples": len(all_images)}
    for name, own_ranks in directions.items():
        ranks, _ = gather_rows(own_ranks, group)
        for k in (1, 5, 10):
            metrics[f"{name}_r{k}"] = float((ranks <= k).float().mean())
        metrics[f"{name}_median_rank"] = float(ranks.median())
    return metrics


def retrieval_ranks(
    queries: torch.Tensor, candidates: torch.Tensor, partner: torch.Tensor, chunk: int = 1024
) -> torch.Tensor:
    """Rank (from 1) of candidate `partner[i]` for query i: queries [n, D], candidates [N, D], partner [n] -> [n] f32.

    Plain PyTorch: scores = queries @ candidates.T; own = scores[i, partner[i]]; 1 + (scores > own).sum() + ties / 2
    """
    ranks = []
    for query, index in zip(queries.split(chunk), partner.split(chunk)):
        scores = query @ candidates.T  # [chunk, N]
        own = scores.gather(1, index[:, None])
        ties = (scores == own).sum(1) - 1
        ranks.append(1.0 + (scores > own).sum(1) + 0.5 * ties)
    return torch.cat(ranks) if ranks else torch.zeros(0, device=queries.device)
