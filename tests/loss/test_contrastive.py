"""All losses by name: same call, same averages, on any process group."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from infcl import RingOptions, info_nce_loss
from infcl.loss.contrastive import LOSSES, ContrastiveLoss
from infcl.loss.gradients import add_rows
from infcl.parallel import require_equal
from tests.lib.loss_oracle import LIBRARY, features, mean_kl, means_over_ranks
from tests.lib.ranks import rejected, run_ranks


def _local_batches(rank, world_size):
    """Two groups of two ranks, each with its own batch: rank 0 and 2 work on one, 1 and 3 on the other."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    images, texts = features("random", 10, 24, seed=rank % 2)
    mine = slice(5 * (rank // 2), 5 * (rank // 2) + 5)
    losses = []
    for name in LOSSES:
        images_here = images[mine].clone().requires_grad_()
        loss = ContrastiveLoss(name, group=group)(images_here, texts[mine], 10.0, -3.0)
        loss.backward()
        losses.append((loss.detach(), images_here.grad))
    return losses


def test_losses_stay_inside_the_group_they_are_given():
    results = run_ranks(_local_batches, 4)
    for members, seed in (((0, 2), 0), ((1, 3), 1)):
        for name, *per_rank in zip(LOSSES, *(results[member] for member in members)):
            images, texts = features("random", 10, 24, seed=seed)
            alone = ContrastiveLoss(name)(images.requires_grad_(), texts, 10.0, -3.0)
            loss, gradient = means_over_ranks(per_rank)
            torch.testing.assert_close(loss, alone.detach(), rtol=1e-5, atol=0)
            torch.testing.assert_close(gradient, *torch.autograd.grad(alone, images), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "texts_per_image"), [*((name, 1) for name in LOSSES), ("inf_cl", 3)])
def test_a_teacher_adds_its_distillation_loss_by_weight(name, texts_per_image):
    """Of the first of an image's texts."""
    images, texts = features("random", 7 * texts_per_image, 24, torch.float64)
    teacher, own = (*features("apart", 7, 16, torch.float64), 40.0), images[:7]
    captions = 1 if texts_per_image > 1 else None
    loss = ContrastiveLoss(name, distillation=0.7, captions=captions, options=RingOptions(tile_dtype="fp64"))
    added = loss(own, texts, 10.0, -3.0, teacher=teacher) - loss(own, texts, 10.0, -3.0)
    torch.testing.assert_close(added, 0.7 * mean_kl(own, texts[::texts_per_image], 10.0, *teacher))


def _fixed_shape(rank, world_size, name):
    """-> (what an unequal first call says; losses of both kinds and comparisons of 3 calls; what later changes say)"""
    with mock.patch("infcl.loss.inputs.require_equal", side_effect=require_equal) as compared:
        fixed = ContrastiveLoss(name, group=dist.group.WORLD, fixed_shape=True)
        unequal = rejected(fixed, *features("random", 4 + rank, 24), 10.0, -3.0)
        compared.reset_mock()
        losses = []
        for seed in range(3):
            pairs = features("random", 5, 24, seed=world_size * seed + rank)
            with torch.no_grad():
                losses.append(
                    [loss(*pairs, 10.0, -3.0).item() for loss in (fixed, ContrastiveLoss(name, group=dist.group.WORLD))]
                )
        own = compared.call_count - 3  # without those of the loss that always compares
        images, texts = (side.requires_grad_() for side in features("random", 5, 24))
        fixed(images, texts, 10.0, -3.0)  # requires_grad is compared in the first call with gradients
        others = features("random", 6, 24), (images, texts.detach())
        later = [rejected(fixed, *other, 10.0, -3.0) for other in others] if rank == 1 else None
        return unequal, losses, own, later


@pytest.mark.parametrize("name", LOSSES)
def test_a_fixed_shape_is_compared_once_and_a_change_is_rejected_with_the_numbers(name):
    results = run_ranks(_fixed_shape, 2, name)
    for unequal, losses, compared, _ in results:
        assert "[4, 5]" in unequal
        assert all(got == expected for got, expected in losses) and compared == 1
    shape, requires_grad = results[1][-1]
    assert "rank 1 has features of shape (6, 24), all ranks had (5, 24)" in shape
    assert "rank 1 has features of requires_grad (True, False), all ranks had (True, True)" in requires_grad


@pytest.mark.first(11)
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in ("kept", "checkpointed", "compiled") for name in LIBRARY]
)
def test_a_loss_in_a_callers_graph_is_the_same_to_the_bit(way, name):
    """In one of which gradients are taken twice; in torch.utils.checkpoint, which gives what was saved to whoever reads
    it once; in a compiled one, which breaks around it."""

    def step(a, b):
        first, second = (torch.nn.functional.normalize(side, dim=1) for side in (a, b))
        return 2 * LIBRARY[name](first, second, group=None)

    torch._dynamo.reset()
    pairs = [side.requires_grad_() for side in features("random", 5, 24)]
    plain = step(*pairs)
    expected = [plain.detach(), *(one.clone() for one in torch.autograd.grad(plain, pairs, retain_graph=True))]
    value = {
        "kept": lambda: plain,
        "checkpointed": lambda: checkpoint(step, *pairs, use_reentrant=False),
        "compiled": lambda: torch.compile(step, backend="aot_eager")(*pairs),
    }[way]()
    assert all(map(torch.equal, [value.detach(), *torch.autograd.grad(value, pairs)], expected))


def _twice(rank, world_size):
    """{loss: whether value and gradients are the same twice}; in info_nce all queries share two documents."""
    group = dist.group.WORLD if world_size > 1 else None
    shared = torch.arange(200) % 2
    losses = LIBRARY | {"info_nce": lambda a, b, **options: info_nce_loss(a, b, shared, 10.0, **options)}
    pairs, same = [side.requires_grad_() for side in features("random", 200, 24, seed=rank)], {}
    for name, loss in losses.items():
        results = []
        for _ in range(2):
            value = loss(*pairs, group=group, options=RingOptions(tile_dtype="bf16"))
            results.append((value.detach(), *torch.autograd.grad(value, pairs)))
        same[name] = all(torch.equal(a, b) for a, b in zip(*results))
    return same


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_tiled_loss_is_the_same_twice_bit_for_bit(world_size):
    for same in run_ranks(_twice, world_size) if world_size > 1 else [_twice(0, 1)]:
        assert same == dict.fromkeys(LIBRARY, True)


def test_many_queries_of_one_document_are_summed_in_a_fixed_order():
    """With threads, of which a test's ranks have one."""
    rows, threads = torch.randn(3000, 24, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    sums = [torch.zeros(3000, 24) for _ in range(60)]
    torch.set_num_threads(2)
    for total in sums:
        add_rows(total, torch.arange(3000) % 2, rows)
    torch.set_num_threads(threads)
    assert all(torch.equal(total, sums[0]) for total in sums)
