"""The ring loss equals the dense float64 loss: value, feature gradients, logit_scale gradient."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl import InfCLLoss, inf_cl_loss, info_nce_loss, nt_xent_loss, siglip_loss
from infcl.loss.inf_cl import cross_entropies, ring_backward, ring_forward
from infcl.loss.inputs import set_up
from tests.lib.loss_oracle import FEATURES, Case, averaged, evaluate, evaluate_on_rank, features, oracle, relative_error
from tests.lib.ranks import rejected, run_ranks

ROWS_PER_RANK = {1: 37, 2: 17, 3: 11, 4: 9}
GRADIENTS = ("d_images", "d_texts", "d_scale")


def _over_ranks(cases, world_size, **options):
    if world_size == 1:
        return [evaluate(case, **options) for case in cases]
    per_rank = run_ranks(evaluate_on_rank, world_size, cases, options)
    return [averaged(list(evaluations)) for evaluations in zip(*per_rank)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_loss_and_gradients_equal_the_dense_float64_loss(world_size):
    rows = world_size * ROWS_PER_RANK[world_size]
    sizes = itertools.product((24, 100, 513, 640), (1.0, 14.3, 100.0))
    cases = [Case("inf_cl", rows, dim, scale) for dim, scale in sizes]
    for case, result in zip(cases, _over_ranks(cases, world_size)):
        reference = oracle(case)
        assert relative_error(result.loss, reference.loss) < 1e-5, case
        for name in GRADIENTS:
            assert relative_error(getattr(result, name), getattr(reference, name)) < 1e-5, (case, name)


@pytest.mark.parametrize("nodes, ranks_per_node", [(2, 2), (2, 4), (4, 2)])
def test_every_ring_gives_the_dense_float64_loss(nodes, ranks_per_node):
    world_size = nodes * ranks_per_node
    cases = [Case(name, 5 * world_size, 24, 30.0, bias=-3.0) for name in ("inf_cl", "siglip")]
    options = {"ring": "two-level", "ranks_per_node": ranks_per_node}
    for case, result in zip(cases, _over_ranks(cases, world_size, **options)):
        reference = oracle(case)
        for name in ("loss", *GRADIENTS):
            assert relative_error(getattr(result, name), getattr(reference, name)) < 1e-5, (case, name)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adversarial_features_stay_exact_and_finite(world_size, dtype):
    rows = world_size * ROWS_PER_RANK[world_size]
    kinds = FEATURES if dtype == torch.float64 else [kind for kind in FEATURES if kind != "long"]
    cases = [Case("inf_cl", rows, 40, scale, kind, dtype) for kind in kinds for scale in (1.0, 100.0)]
    # float32 logits near 100 are known to 1e-5, and so are probabilities: an absolute error of the gradients.
    tolerance = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-3}[dtype]
    for case, result in zip(cases, _over_ranks(cases, world_size)):
        reference = oracle(case)
        assert result.loss >= 0, case
        assert relative_error(result.loss, reference.loss, floor=1.0) < 3e-5, case
        for name, floor in (
            ("d_images", case.scale / rows**0.5),
            ("d_texts", case.scale / rows**0.5),
            ("d_scale", 1.0),
        ):
            assert relative_error(getattr(result, name), getattr(reference, name), floor) < tolerance, (case, name)


def test_loss_and_gradients_are_finite_for_huge_norms():
    for norm in (1e3, 1e6, 1e15):
        images, texts = (norm * f for f in features("random", 20, 24))
        images.requires_grad_(), texts.requires_grad_()
        scale = torch.tensor(100.0, requires_grad=True)
        loss = inf_cl_loss(images, texts, scale)
        loss.backward()
        assert loss.isfinite() and loss >= 0
        for gradient in (images.grad, texts.grad, scale.grad):
            assert gradient.isfinite().all()


def test_loss_of_perfect_matches_is_never_negative():
    for seed in range(10):
        images, _ = features("random", 50, 64, seed=seed)
        assert inf_cl_loss(images, images, 100.0) >= 0


def test_chunks_of_any_size_give_the_same_result():
    reference = oracle(Case("inf_cl", 23, 24, 30.0))
    for workspace_bytes in (1, 100, 1000, 10**4, 10**9):
        result = evaluate(Case("inf_cl", 23, 24, 30.0, workspace_bytes=workspace_bytes))
        assert relative_error(result.loss, reference.loss) < 1e-6
        assert relative_error(result.d_texts, reference.d_texts) < 1e-5


@pytest.mark.parametrize("name", ["inf_cl", "siglip"])
def test_a_side_without_gradient_leaves_the_others_exact(name):
    case = Case(name, 15, 24, 20.0, bias=-4.0)
    reference = oracle(case)
    for need_images, need_texts in ((True, False), (False, True), (False, False)):
        images, texts = features(case.kind, case.rows, case.dim)
        images.requires_grad_(need_images), texts.requires_grad_(need_texts)
        scale = torch.tensor([case.scale], requires_grad=True)
        loss = inf_cl_loss(images, texts, scale) if name == "inf_cl" else siglip_loss(images, texts, scale, case.bias)
        loss.backward()
        assert scale.grad.shape == (1,) and relative_error(scale.grad[0], reference.d_scale) < 1e-5
        assert images.grad is None or relative_error(images.grad, reference.d_images) < 1e-5
        assert texts.grad is None or relative_error(texts.grad, reference.d_texts) < 1e-5
        assert (images.grad is not None, texts.grad is not None) == (need_images, need_texts)


def test_upstream_gradient_multiplies_all_gradients():
    case = Case("inf_cl", 9, 24, 20.0)
    reference = oracle(case)
    images, texts = (f.requires_grad_() for f in features(case.kind, case.rows, case.dim))
    scale = torch.tensor(case.scale, requires_grad=True)
    (1024 * InfCLLoss()(images, texts, scale)).backward()
    for name, leaf in zip(GRADIENTS, (images, texts, scale)):
        assert relative_error(leaf.grad, 1024 * getattr(reference, name)) < 1e-5


def test_ring_functions_need_no_autograd():
    images, texts = features("random", 11, 24, torch.float64)
    scale = torch.tensor(5.0, dtype=torch.float64)
    setup = set_up("inf_cl", images.requires_grad_(), texts.requires_grad_(), None, {"workspace_bytes": 1000})
    images, texts = images.detach(), texts.detach()
    losses, cosines, _ = ring_forward(images, texts, scale, setup)
    logits = scale * images @ texts.T
    torch.testing.assert_close(losses[0], logits.logsumexp(1) - logits.diagonal())
    torch.testing.assert_close(losses[1], logits.logsumexp(0) - logits.diagonal())
    torch.testing.assert_close(scale * cosines, logits.diagonal())
    d_logits = (logits.softmax(1) + logits.softmax(0)) / 2 - torch.eye(11)
    d_rows, d_columns, d_scale = ring_backward(images, texts, scale, losses, cosines, setup)
    torch.testing.assert_close(d_scale, (d_logits * (images @ texts.T)).sum())
    torch.testing.assert_close(d_rows, d_logits @ texts)
    torch.testing.assert_close(d_columns, d_logits.T @ images)


@pytest.mark.parametrize("name, kind", [("inf_cl", "apart"), ("siglip", "aligned")])
def test_the_loss_of_separated_pairs_is_precise(name, kind):
    """Relative to the tiny loss and gradients themselves, which a float32 LSE less the matched logit would not give."""
    case = Case(name, 40, 256, 100.0, kind, bias=-45.0)
    reference, result = oracle(case), evaluate(case)
    assert 0 < reference.loss < 1e-4
    for field in ("loss", "d_images", "d_texts", "d_scale"):
        assert relative_error(getattr(result, field), getattr(reference, field)) < 1e-3, field


def test_a_feature_that_is_not_finite_is_seen_in_the_loss():
    for value in (float("inf"), float("nan")):
        images, texts = torch.full((2, 3, 4), 0.5)
        images[0, 0], texts[1, 0] = value, -0.5
        assert inf_cl_loss(images, texts, 1.0).isnan()
        assert info_nce_loss(images, texts, torch.arange(3), 1.0).isnan()
        assert nt_xent_loss(images, texts, 1.0).isnan()


def test_autocast_changes_nothing():
    def run():
        images, texts = (f.requires_grad_() for f in features("random", 13, 24))
        scale = torch.tensor(50.0, requires_grad=True)
        loss = inf_cl_loss(images, texts, scale)
        loss.backward()
        return loss.detach(), images.grad, texts.grad, scale.grad

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    for a, b in zip(plain, cast):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


def test_double_backward_says_that_it_is_not_supported():
    images, texts = (f.requires_grad_() for f in features("random", 5, 24))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(inf_cl_loss(images, texts, 10.0), images, create_graph=True)


def test_low_precision_tiles_return_float32_gradients_for_float32_features():
    case = Case("inf_cl", 33, 64, 20.0)
    reference, result = oracle(case), evaluate(case, tile_dtype="bf16")
    assert result.d_images.dtype == torch.float32
    assert 1e-5 < relative_error(result.d_images, reference.d_images) < 2e-2


@pytest.mark.parametrize(
    "shapes, pattern",
    [
        (((4, 8), (5, 8)), r"\(4, 8\), \(5, 8\)"),
        (((4, 8), (4, 9)), r"\(4, 8\), \(4, 9\)"),
        (((0, 8), (0, 8)), r"\(0, 8\)"),
        (((8,), (8,)), r"\(8,\)"),
    ],
)
def test_wrong_shapes_are_rejected_with_the_shapes(shapes, pattern):
    with pytest.raises(ValueError, match=pattern):
        inf_cl_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)


def test_wrong_options_are_rejected_by_name():
    images, texts = features("random", 5, 24)
    with pytest.raises(ValueError, match="unknown tile 'cuda'"):
        inf_cl_loss(images, texts, 1.0, tile="cuda")
    with pytest.raises(ValueError, match="'int8'"):
        inf_cl_loss(images, texts, 1.0, tile_dtype="int8")
    with pytest.raises(ValueError, match=r"\(5, 24\)"):
        inf_cl_loss(images, texts, images)
    with pytest.raises(ValueError, match="on one device; got cpu, meta"):
        inf_cl_loss(images, texts.to("meta"), 1.0)
    with pytest.raises(ValueError, match="workspace_bytes 0 must be positive"):
        inf_cl_loss(images, texts, 1.0, workspace_bytes=0)
    with pytest.raises(TypeError, match="'tiles'"):
        inf_cl_loss(images, texts, 1.0, tiles="torch")
    with pytest.raises(ValueError, match="unknown ring 'two'"):  # of one rank as of several
        inf_cl_loss(images, texts, 1.0, ring="two")
    with pytest.raises(ValueError, match="needs features on a GPU, not on cpu"):
        inf_cl_loss(images, texts, 1.0, tile="triton")


@pytest.mark.parametrize("scale", [1.6e6, float("inf"), float("nan")])
def test_an_impossible_scale_is_rejected(scale):
    """exp of what is the scale already. A tensor is not read: the host would wait for the GPU."""
    images, texts = features("random", 5, 24)
    with pytest.raises(ValueError, match="expected"):
        inf_cl_loss(images, texts, scale)
    inf_cl_loss(images, texts, torch.tensor(scale))


def _unequal_ranks(rank, world_size):
    messages = []
    halves = torch.float16 if rank == 1 else torch.bfloat16  # of as many bytes
    for rows, dtype in ((4 + rank, torch.float32), (4, torch.float64 if rank == 1 else torch.float32), (4, halves)):
        images, texts = features("random", rows, 8, dtype)
        messages.append(rejected(inf_cl_loss, images, texts, 1.0, group=dist.group.WORLD))
    return messages


def test_unequal_rows_and_dtypes_are_rejected_on_every_rank():
    for rows, dtypes, halves in run_ranks(_unequal_ranks, 3):
        assert "number of rows" in rows and "[4, 5, 6]" in rows
        assert "same dtype" in dtypes and "['torch.float32', 'torch.float64', 'torch.float32']" in dtypes
        assert "['torch.bfloat16', 'torch.float16', 'torch.bfloat16']" in halves


def _unequal_wishes(rank, world_size):
    """What each loss says where rank 1 alone wants no gradient of its texts (or documents)."""
    images, texts = (side.requires_grad_() for side in features("random", 4, 8))
    texts.requires_grad_(rank != 1)
    losses = {
        "inf_cl": lambda: inf_cl_loss(images, texts, 1.0, group=dist.group.WORLD),
        "siglip": lambda: siglip_loss(images, texts, 1.0, 0.0, group=dist.group.WORLD),
        "info_nce": lambda: info_nce_loss(images, texts, torch.arange(4), 1.0, group=dist.group.WORLD),
    }
    return {name: rejected(loss) for name, loss in losses.items()}


def test_a_gradient_that_not_all_ranks_need_is_rejected_on_every_rank():
    """Gradients of columns travel: ranks that send them would wait for one that does not."""
    for messages in run_ranks(_unequal_wishes, 3):
        for name, message in messages.items():
            assert f"{name} needs the same requires_grad of columns on every rank" in message and "[1, 0, 1]" in message


def _missing_group(rank, world_size):
    return rejected(inf_cl_loss, *features("random", 4, 8), 1.0)


def test_the_loss_is_never_silently_local():
    for message in run_ranks(_missing_group, 2):
        assert "pass group=" in message


def test_cross_entropies_of_separated_pairs_are_precise():
    others = torch.tensor([-math.inf, 3.0, 10.0, 31.0, 95.0, 1e30, -1e30])
    matched = torch.tensor([5.0, 3.5, 30.0, 30.0, 30.0, 1e30, 1e30])
    losses = cross_entropies(others, matched)
    difference = (others.double() - matched.double()).clamp_min(-1e4)
    torch.testing.assert_close(losses.double(), F.softplus(difference, threshold=100))
    torch.testing.assert_close(torch.expm1(-losses).double(), -difference.sigmoid())
    assert not losses.signbit().any()


def test_a_matched_logit_that_is_not_finite_is_not_hidden():
    others = torch.tensor([[-math.inf, 3.0, math.inf, 3.0], [2.0, math.inf, 3.0, math.nan]])
    assert cross_entropies(others, torch.full((4,), math.inf)).isnan().all()
    assert cross_entropies(others, torch.full((4,), math.nan)).isnan().all()
