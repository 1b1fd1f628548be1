"""Losses with ids of samples equal dense float64 losses written from the formulas of infcl/loss/duplicates.py."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import InfCLLoss, SigLipLoss, inf_cl_loss, info_nce_loss, siglip_loss
from tests.lib.loss_oracle import means_over_ranks, relative_error
from tests.lib.ranks import rejected, run_ranks

MODES = ("mask", "positive")


class Case(NamedTuple):
    rows: int  # per rank
    dim: int
    scale: float
    groups: str  # how ids are drawn
    kinds: str = "image"  # of ids: "image", "text" or "both"
    dtype: torch.dtype = torch.float64


CASES = [
    Case(7, 24, 5.0, "pairs", "text"),
    Case(13, 40, 100.0, "few", "both"),
    Case(151, 24, 20.0, "to 300"),
    Case(5, 1000, 100.0, "one"),
    Case(31, 72, 30.0, "few", "both", torch.float32),
    Case(9, 24, 10.0, "none"),
]


def _ids(groups: str, count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [count]; equal ids are anywhere."""
    sizes = {"none": [1], "pairs": [1, 2], "few": [1, 2, 5], "to 300": [1, 7, 300, 40], "one": [count]}[groups]
    numbers = torch.arange(len(sizes) * count).repeat_interleave(torch.tensor(sizes * count))[:count]
    return (numbers - 3)[torch.randperm(count, generator=generator)] * (2**62 // count)  # of both signs, and far apart


def _global_batch(case: Case, world_size: int):
    """Images and texts [B, D] in the case's dtype, image ids and text ids [B]."""
    generator, count = torch.Generator().manual_seed(case.rows), case.rows * world_size
    draw = lambda: F.normalize(torch.randn(count, case.dim, generator=generator, dtype=torch.float64), dim=1)  # noqa: E731
    images = draw()
    texts = F.normalize(draw() + 0.5 * images, dim=1)
    ids = _ids(case.groups, count, generator), _ids(case.groups, count, generator)
    return images.to(case.dtype), texts.to(case.dtype), *ids


def _softmax_loss(logits, same, matched, mode):
    """Mean over the rows; same, matched: bool like the logits; one match per row."""
    if mode == "mask":
        logits = logits.masked_fill(same & ~matched, -torch.inf)
        same = matched
    else:
        same = same | matched
    means = torch.where(same, logits, 0).sum(1) / same.sum(1)
    return (logits.logsumexp(1) - means).mean()


def _oracle(name, case, world_size, mode):
    images, texts, *ids = _global_batch(case, world_size)
    images, texts = images.double().requires_grad_(), texts.double().requires_grad_()
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-case.scale / 2, dtype=torch.float64, requires_grad=True)
    used = [kind for kind, name in zip(ids, ("image", "text")) if case.kinds in (name, "both")]
    same, own = sum(kind[:, None] == kind for kind in used) > 0, torch.eye(len(images), dtype=torch.bool)
    logits = scale * images @ texts.T
    if name == "siglip":
        signs = torch.where(own | (same & (mode == "positive")), 1.0, -1.0)
        left_out = same & ~own & (mode == "mask")
        loss = (-F.logsigmoid(signs * (logits + bias)) * ~left_out).sum() / len(images)
    else:
        loss = (_softmax_loss(logits, same, own, mode) + _softmax_loss(logits.T, same.T, own, mode)) / 2
    loss.backward()
    return loss.detach(), images.grad, texts.grad, scale.grad, torch.zeros(()) if bias.grad is None else bias.grad


def _evaluate(rank, world_size, name, cases, mode, options):
    results = []
    for case in cases:
        images, texts, *ids = (side.chunk(world_size)[rank].clone() for side in _global_batch(case, world_size))
        scalars = [torch.tensor(x, dtype=case.dtype, requires_grad=True) for x in (case.scale, -case.scale / 2)]
        leaves = [images.requires_grad_(), texts.requires_grad_(), *scalars]
        given = {f"{kind}_ids": one for one, kind in zip(ids, ("image", "text")) if case.kinds in (kind, "both")}
        group = dist.group.WORLD if world_size > 1 else None
        module = (SigLipLoss if name == "siglip" else InfCLLoss)(
            group=group, duplicates=mode, workspace_bytes=4000, **options
        )
        loss = module(*leaves, **given)
        loss.backward()
        results.append([loss.detach(), *(torch.zeros(()) if x.grad is None else x.grad for x in leaves)])
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["inf_cl", "siglip"])
@pytest.mark.parametrize("world_size, options", [
    (1, {}), (2, {}), (3, {}), (4, {}), (4, {"ring": "two-level", "ranks_per_node": 2})
])  # fmt: skip
def test_losses_with_ids_equal_the_dense_float64_loss(world_size, options, name, mode):
    arguments = name, CASES, mode, options
    per_rank = run_ranks(_evaluate, world_size, *arguments) if world_size > 1 else [_evaluate(0, 1, *arguments)]
    for case, results in zip(CASES, zip(*per_rank)):
        bound = 1e-11 if case.dtype == torch.float64 else 2e-5
        for value, reference in zip(means_over_ranks(results), _oracle(name, case, world_size, mode)):
            assert relative_error(value, reference, floor=0.1) < bound, (case, value, reference)


def _info_nce_batch(case, world_size):
    """Two documents and a half per query; several queries share one; ids that documents share across ranks."""
    generator, queries, documents = torch.Generator().manual_seed(case.rows), case.rows, case.rows * 5 // 2 + 1
    if case.kinds == "text":
        queries, documents = documents, queries
    q, d = (
        F.normalize(torch.randn(n * world_size, case.dim, generator=generator), dim=1) for n in (queries, documents)
    )
    positives = torch.randint(0, documents, (world_size, queries), generator=generator)
    return q.to(case.dtype), d.to(case.dtype), positives, _ids(case.groups, documents * world_size, generator)


def _info_nce_oracle(case, world_size, mode):
    q, d, positives, ids = _info_nce_batch(case, world_size)
    q, d = q.double().requires_grad_(), d.double().requires_grad_()
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    labels = (positives + torch.arange(world_size)[:, None] * (len(d) // world_size)).flatten()
    loss = _softmax_loss(scale * q @ d.T, ids[labels][:, None] == ids, F.one_hot(labels, len(d)).bool(), mode)
    loss.backward()
    return loss.detach(), q.grad, d.grad, scale.grad


def _evaluate_info_nce(rank, world_size, cases, mode, options):
    results = []
    for case in cases:
        q, d, positives, ids = (x.chunk(world_size)[rank].clone() for x in _info_nce_batch(case, world_size))
        leaves = [
            q.requires_grad_(),
            d.requires_grad_(),
            torch.tensor(case.scale, dtype=case.dtype, requires_grad=True),
        ]
        group = dist.group.WORLD if world_size > 1 else None
        options = {"group": group, "workspace_bytes": 4000, **options}
        loss = info_nce_loss(q, d, positives[0], leaves[2], document_ids=ids, duplicates=mode, **options)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in leaves)])
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_info_nce_with_document_ids_equals_the_dense_float64_loss(world_size, mode):
    arguments = CASES, mode, {}
    per_rank = (
        run_ranks(_evaluate_info_nce, world_size, *arguments)
        if world_size > 1
        else [_evaluate_info_nce(0, 1, *arguments)]
    )
    for case, results in zip(CASES, zip(*per_rank)):
        bound = 1e-11 if case.dtype == torch.float64 else 2e-5
        for value, reference in zip(means_over_ranks(results), _info_nce_oracle(case, world_size, mode)):
            assert relative_error(value, reference, floor=0.1) < bound, (case, value, reference)


def test_ids_that_do_not_fit_are_rejected_with_the_numbers():
    features, ids = torch.eye(5, 8), torch.arange(5)
    for loss in (inf_cl_loss, lambda *f, **o: siglip_loss(*f, 0.0, **o)):
        with pytest.raises(ValueError, match=r"image_ids must be int64 \[5\], one per row; got \(4,\) torch.int64"):
            loss(features, features, 1.0, image_ids=ids[:4], duplicates="mask")
        with pytest.raises(ValueError, match=r"text_ids must be int64 \[5\], one per row; got \(5,\) torch.int32"):
            loss(features, features, 1.0, text_ids=ids.int(), duplicates="mask")
        with pytest.raises(ValueError, match="duplicates='mask' needs image_ids or text_ids"):
            loss(features, features, 1.0, duplicates="mask")
        with pytest.raises(ValueError, match="duplicates is one of .*, not 'none'"):
            loss(features, features, 1.0, image_ids=ids, duplicates="none")


def _unequal_modes(rank, world_size):
    features, options = torch.eye(5, 8), {"group": dist.group.WORLD, "image_ids": torch.arange(5)}
    texts = {"text_ids": torch.arange(5)} if rank == 1 else {}
    return [
        rejected(inf_cl_loss, features, features, 1.0, duplicates="mask", **options, **texts),
        rejected(inf_cl_loss, features, features, 1.0, duplicates=MODES[rank], **options),
    ]


def test_ranks_with_other_ids_or_another_treatment_of_them_are_rejected():
    for ids, modes in run_ranks(_unequal_modes, 2):
        assert "same text_ids on every rank; ranks 0.. have [0, 1]" in ids
        assert "same duplicates='mask' on every rank; ranks 0.. have [1, 0]" in modes
