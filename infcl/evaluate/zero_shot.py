"""Zero-shot classification: a [K, D] classifier from class prompts; every rank scores its share of the images.

A class embedding is the normalised mean of its prompts' unit-norm features (Radford et al. 2021). Prompts and images
are distributed over the ranks, which exchange only the [K, D] sum and three counts.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl.evaluate.features import in_step


def build_classifier(
    encode_text: Callable[[torch.Tensor], torch.Tensor],
    tokenize: Callable[[list[str]], torch.Tensor],
    classnames: Sequence[str],
    templates: Sequence[str],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    batch_size: int = 256,
) -> torch.Tensor:
    """Compute class embeddings [K, D] f32, unit norm, on every rank. Collective: one all-reduce of [K, D].

    Args:
        encode_text: tokens [n, L] on the host -> features [n, D] on the device.
        tokenize: texts -> tokens [n, L].
        classnames: K names.
        templates: prompts with one {} for the class name.
        batch_size: prompts per forward.
    """
    prompts = [(k, template.replace("{}", name)) for k, name in enumerate(classnames) for template in templates]
    chunks = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    own_chunks = chunks[dist.get_rank(group) :: dist.get_world_size(group)]
    sums = None
    for chunk, is_real in in_step(own_chunks, chunks[0], group, device):
        labels = torch.tensor([k for k, _ in chunk], device=device)
        with torch.no_grad():
            features = encode_text(tokenize([text for _, text in chunk])).float()  # [chunk, D]
        if sums is None:
            sums = torch.zeros(len(classnames), features.shape[1], device=device)
        if is_real:
            sums.index_add_(0, labels, features)
    assert sums is not None, "there are prompts"
    dist.all_reduce(sums, group=group)
    return F.normalize(sums, dim=-1)


def evaluate_zero_shot(
    encode_image: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    filler: tuple[torch.Tensor, torch.Tensor],
    classifier: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    right: torch.Tensor | None = None,
) -> dict[str, float]:
    """Compute top-1 and top-5 accuracy over all ranks' images. Collective.

    Args:
        encode_image: uint8 [m, 3, H, W] on the device -> features [m, D].
        batches: this rank's (uint8 images [m, 3, H, W], int64 labels [m]).
        filler: a batch for ranks that run out early.
        classifier: f32 [K, D], unit norm.
        right: bool [labels, K], the correct classes of each label; None: class k for label k.

    Returns:
        top1, top5 (shares) and num_samples.

    Raises:
        ValueError: no rank has a labelled sample.
    """
    right = torch.eye(len(classifier), dtype=torch.bool) if right is None else right
    right = right.to(device)
    counts = torch.zeros(3, dtype=torch.float64, device=device)  # top-1 hits, top-5 hits, samples
    top = min(5, len(classifier))
    for (images, labels), is_real in in_step(batches, filler, group, device):
        with torch.no_grad():
            scores = encode_image(images.to(device, non_blocking=True)).float() @ classifier.T  # [m, K]
        if is_real:
            hits = right[labels.to(device)].gather(1, scores.topk(top, dim=-1).indices)  # [m, top]
            counts += torch.stack(
                [hits[:, 0].sum(), hits.any(1).sum(), hits.new_tensor(len(labels), dtype=torch.int64)]
            )
    dist.all_reduce(counts, group=group)
    top1, top5, samples = counts.tolist()
    if samples == 0:
        raise ValueError("zero-shot evaluation found no labelled sample")
    return {"top1": top1 / samples, "top5": top5 / samples, "num_samples": samples}
