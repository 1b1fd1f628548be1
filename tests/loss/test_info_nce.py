"""One-directional InfoNCE over the ring equals the dense float64 cross entropy, for any choice of positives."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import info_nce_loss
from tests.lib.loss_oracle import features, relative_error
from tests.lib.pair_losses import INFO_NCE, assert_equal, evaluate, global_batch, reference
from tests.lib.ranks import rejected, run_ranks

TOLERANCE = 1e-5
CASE = INFO_NCE[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_info_nce_equals_the_dense_float64_cross_entropy(world_size):
    per_rank = run_ranks(evaluate, world_size, INFO_NCE) if world_size > 1 else [evaluate(0, 1, INFO_NCE)]
    assert_equal(per_rank, INFO_NCE, TOLERANCE)


def test_info_nce_is_exact_over_a_two_level_ring():
    assert_equal(run_ranks(evaluate, 4, INFO_NCE, ring="two-level", ranks_per_node=2), INFO_NCE, TOLERANCE)


def test_the_loss_of_separated_documents_is_precise():
    queries, documents = features("apart", 40, 256)
    positives = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    documents = documents[positives.argsort()]
    results = []
    for dtype in (torch.float32, torch.float64):
        q, d = (side.to(dtype).requires_grad_() for side in (queries, documents))
        scale = torch.tensor(100.0, dtype=dtype, requires_grad=True)
        if dtype == torch.float32:
            loss = info_nce_loss(q, d, positives, scale, workspace_bytes=448)
        else:
            loss = F.cross_entropy(scale * q @ d.T, positives)
        results.append((loss.detach(), *torch.autograd.grad(loss, (q, d, scale))))
    assert 0 < results[1][0] < 1e-4
    for value, exact in zip(*results):
        assert relative_error(value, exact) < 1e-3


@pytest.mark.parametrize("dtype, tile_dtype", [(torch.float64, "fp32"), (torch.float32, "fp64")])
def test_products_of_another_width_than_the_features(dtype, tile_dtype):
    q, d, positives = global_batch(CASE, 1)
    q, d = q.to(dtype).requires_grad_(), d.to(dtype).requires_grad_()
    loss = info_nce_loss(q, d, positives[0], CASE.scale, tile_dtype=tile_dtype)
    expected_loss, d_queries, d_documents, _ = reference(CASE, 1)
    gradients = torch.autograd.grad(loss, (q, d))
    assert all(gradient.dtype == dtype for gradient in gradients)
    for value, expected in zip((loss.detach(), *gradients), (expected_loss, d_queries, d_documents)):
        assert relative_error(value, expected, floor=0.1) < 1e-5


def test_wrong_positives_are_rejected_with_the_numbers():
    queries, documents = torch.ones(2, 8), torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"1\.\.3; this rank's documents are 0\.\.2"):
        info_nce_loss(queries, documents, torch.tensor([1, 3]), 1.0)
    with pytest.raises(ValueError, match=r"\[2\]; got \(3,\)"):
        info_nce_loss(queries, documents, torch.tensor([0, 1, 2]), 1.0)
    with pytest.raises(ValueError, match=r"\(2, 8\), \(3, 9\)"):
        info_nce_loss(queries, torch.ones(3, 9), torch.tensor([0, 1]), 1.0)
    with pytest.raises(ValueError, match="on one device; got cpu, cpu, meta"):
        info_nce_loss(queries, documents, torch.tensor([0, 1], device="meta"), 1.0)


def _one_misplaced(rank, world_size):
    positives = torch.tensor([0, 3 if rank == 1 else 2])
    return rejected(info_nce_loss, torch.ones(2, 8), torch.ones(3, 8), positives, 1.0, group=dist.group.WORLD)


def test_a_positive_out_of_range_on_one_rank_is_rejected_on_every_rank():
    for rank, message in enumerate(run_ranks(_one_misplaced, 3)):
        assert "validity of inputs on every rank; ranks 0.. have [1, 0, 1]" in message
        assert ("positives are in 0..3; this rank's documents are 0..2" in message) == (rank == 1)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_a_side_without_gradient_leaves_the_others_exact(wanted):
    q, d, positives = global_batch(CASE, 1)
    exact = dict(zip("qds", reference(CASE, 1)[1:]))
    q.requires_grad_(wanted[0]), d.requires_grad_(wanted[1])
    scale = torch.tensor(float(CASE.scale), requires_grad=True)
    sides = {name: x for name, x in zip("qds", (q, d, scale)) if x.requires_grad}
    loss = info_nce_loss(q, d, positives[0], scale)
    for name, gradient in zip(sides, torch.autograd.grad(loss, list(sides.values()))):
        assert relative_error(gradient, exact[name], floor=0.1) < 1e-5, name
