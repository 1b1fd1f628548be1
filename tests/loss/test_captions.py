"""Several captions of an image and hard negatives: the loss over the ring equals its definition in dense float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import inf_cl_loss
from infcl.loss.captions import captions_loss
from infcl.loss.contrastive import ContrastiveLoss
from tests.lib.loss_oracle import means_over_ranks, relative_error
from tests.lib.ranks import run_ranks

# (images per rank, captions K, hard negatives, D, scale, duplicates)
CASES = [
    (5, 2, 0, 24, 20.0, "negative"),
    (7, 3, 1, 40, 100.0, "positive"),
    (6, 1, 2, 24, 10.0, "mask"),
    (3, 1, 1, 24, 10.0, "negative"),
    (1, 2, 1, 24, 5.0, "negative"),
]


def _global_batch(case, world_size):
    count, captions, negatives, dim, _, _ = case
    generator = torch.Generator().manual_seed(count)
    draw = lambda rows: F.normalize(torch.randn(rows, dim, generator=generator), dim=1)  # noqa: E731
    images, texts = draw(count * world_size), draw(count * world_size * (captions + negatives))
    return images, texts, torch.randint(0, 2 * count, (count * world_size,), generator=generator)


def _oracle(case, world_size):
    count, captions, negatives, _, scale, duplicates = case
    images, texts, ids = _global_batch(case, world_size)
    if duplicates == "negative":
        ids = torch.arange(len(ids))
    images, texts = images.double().requires_grad_(), texts.double().requires_grad_()
    scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    logits = scale * images @ texts.unflatten(0, (len(images), -1)).flatten(0, 1).T  # [g, g t]
    each, image_of = captions + negatives, torch.arange(len(texts)) // (captions + negatives)
    is_caption = torch.arange(len(texts)) % each < captions
    same = (ids[:, None] == ids[image_of]) & is_caption
    own = (torch.arange(len(images))[:, None] == image_of) & is_caption
    left_out, positive = (same & ~own, own) if duplicates == "mask" else (torch.zeros_like(own), same)
    logits = logits.masked_fill(left_out, -torch.inf)
    mean = lambda values: (values.masked_fill(~positive, 0)).sum(1) / positive.sum(1)  # noqa: E731
    of_images = (logits.logsumexp(1) - mean(logits)).mean()
    logits, positive = logits[:, is_caption].T, positive[:, is_caption].T
    of_captions = (logits.logsumexp(1) - mean(logits)).mean()
    loss = (of_images + of_captions) / 2
    loss.backward()
    return loss.detach(), images.grad, texts.grad, scale.grad


def evaluate(rank, world_size, **options):
    results = []
    for case in CASES:
        images, texts, ids = (part.chunk(world_size)[rank].clone() for part in _global_batch(case, world_size))
        images.requires_grad_(), texts.requires_grad_()
        scale = torch.tensor(case[4], requires_grad=True)
        group = dist.group.WORLD if world_size > 1 else None
        loss = ContrastiveLoss(
            "inf_cl", captions=case[1], group=group, duplicates=case[5], workspace_bytes=448, **options
        )
        value = loss(images, texts, scale, image_ids=ids)
        value.backward()
        results.append([part.cpu() for part in (value.detach(), images.grad, texts.grad, scale.grad)])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loss_and_its_gradients_are_the_definition_s(world_size):
    everyone = run_ranks(evaluate, world_size)
    for number, case in enumerate(CASES):
        wanted, got = _oracle(case, world_size), means_over_ranks([results[number] for results in everyone])
        for ours, theirs in zip(got, wanted):
            assert relative_error(ours, theirs) < 2e-5, case


def test_one_caption_without_hard_negatives_is_inf_cl():
    images, texts, ids = _global_batch((9, 1, 0, 24, 20.0, ""), 1)
    for duplicates in ("negative", "mask", "positive"):
        options = {"image_ids": ids, "duplicates": duplicates}
        torch.testing.assert_close(
            captions_loss(images, texts, 20.0, **options), inf_cl_loss(images, texts, 20.0, **options)
        )


def test_a_wrong_number_of_texts_per_image_is_rejected():
    images, texts, _ = _global_batch((4, 3, 0, 24, 1.0, ""), 1)
    with pytest.raises(ValueError, match="11 texts are not 2 or more of each of 4 images"):
        captions_loss(images, texts[:11], 1.0, captions=2)
    with pytest.raises(ValueError, match="leaves out all but one of the 3 captions"):
        captions_loss(images, texts, 1.0, captions=3, duplicates="mask")
    with pytest.raises(ValueError, match=r"'mask' needs image_ids \[4\]"):
        captions_loss(images, texts, 1.0, captions=1, duplicates="mask")
