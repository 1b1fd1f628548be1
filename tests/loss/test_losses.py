"""Every loss over the ring equals its definition in dense float64: value and all gradients, at any number of ranks."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infcl import (
    InfCLLoss,
    RingOptions,
    distillation_loss,
    inf_cl_loss,
    info_nce_loss,
    matryoshka,
    nt_xent_loss,
    siglip_loss,
)
from infcl.loss.captions import captions_loss
from infcl.loss.contrastive import LOSSES, TILED
from tests.lib.loss_oracle import FEATURES, Case, evaluate, features, global_batch, oracle, over_ranks, relative_error
from tests.lib.ranks import rejected, run_ranks

FLOAT64 = torch.float64
CASES = [Case("inf_cl", 17, *case) for case in ((24, 1.0), (100, 14.3), (513, 100.0))]
CASES += [
    Case("siglip", 9, dim, scale, bias=bias)
    for dim, scale, bias in ((24, 1.0, 0.0), (640, 10.0, -10.0), (24, 100.0, -5.0))
]
CASES += [Case(name, 7, 40, 100.0) for name in ("clip", "open_clip", "disco")]
CASES += [
    Case("info_nce", 7, 24, 20.0, columns=23),
    Case("info_nce", 9, 40, 100.0, columns=13, positives="shared"),
    Case("info_nce", 11, 24, 10.0, columns=5),  # more queries than documents
    Case("info_nce", 1, 24, 5.0),
]
CASES += [
    Case("nt_xent", 1, 24, 10.0),
    Case("nt_xent", 7, 40, 100.0),
    Case("nt_xent", 6, 24, 20.0, "equal"),
    Case("nt_xent", 9, 24, 50.0, "aligned"),
]
CASES += [  # several captions of an image, and hard negatives
    Case("inf_cl", 5, 24, 20.0, columns=10, captions=2),
    Case("inf_cl", 7, 40, 100.0, columns=28, captions=3, duplicates="positive", ids="pairs"),
    Case("inf_cl", 6, 24, 10.0, columns=18, captions=1, duplicates="mask", ids="few"),
    Case("inf_cl", 9, 24, 20.0, columns=9, captions=1, duplicates="mask", ids="pairs"),  # as without captions
    Case("inf_cl", 3, 24, 10.0, columns=6, captions=1),
    Case("inf_cl", 1, 24, 5.0, columns=3, captions=2),
    Case("inf_cl", 9, 24, 10.0, columns=18, captions=1, duplicates="mask", ids="few", negatives_have_ids=True),
    Case("inf_cl", 6, 24, 10.0, columns=24, captions=2, duplicates="positive", ids="pairs", negatives_have_ids=True),
]
IDS = [
    Case("", 7, 24, 5.0, "apart", FLOAT64, ids="pairs"),
    Case("", 151, 24, 20.0, "apart", FLOAT64, ids="to 300", workspace_bytes=4000),
    Case("", 5, 1000, 100.0, "apart", FLOAT64, ids="one"),
    Case("", 31, 72, 30.0, "apart", ids="few"),
    Case("", 9, 24, 10.0, "apart", FLOAT64),
]
for case, mode in itertools.product(IDS, ("mask", "positive")):
    CASES += [case._replace(name=name, duplicates=mode, bias=-case.scale / 2) for name in ("inf_cl", "siglip")]
    queries, documents = case.rows, case.rows * 5 // 2 + 1
    queries, documents = (documents, queries) if case.ids == "pairs" else (queries, documents)
    sizes = {"rows": queries, "columns": documents, "positives": "shared"}
    CASES.append(case._replace(name="info_nce", duplicates=mode, kind="random", **sizes))
for margin in (-0.1, 0.1, -2.0):  # from a few entries left out to all negatives
    CASES += [
        Case("inf_cl", 17, 24, 100.0, "random", FLOAT64, margin=margin),
        Case("inf_cl", 9, 24, 100.0, "opposite", FLOAT64, margin=margin),
        Case("inf_cl", 13, 40, 20.0, "apart", FLOAT64, ids="few", duplicates="mask", margin=margin),
        Case("inf_cl", 13, 40, 20.0, "random", FLOAT64, ids="few", duplicates="positive", margin=margin),
        Case("inf_cl", 6, 24, 10.0, columns=18, captions=1, duplicates="mask", ids="few", margin=margin),
        Case("siglip", 9, 40, 10.0, dtype=FLOAT64, bias=-10.0, margin=margin),
        Case("siglip", 9, 40, 10.0, dtype=FLOAT64, bias=-10.0, ids="few", duplicates="positive", margin=margin),
        Case("info_nce", 7, 24, 20.0, dtype=FLOAT64, columns=23, margin=margin),
        Case("info_nce", 9, 40, 100.0, dtype=FLOAT64, columns=13, positives="shared", margin=margin, ids="few",
             duplicates="mask"),
    ]  # fmt: skip


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "world_size, options",  # 3 and 32 ranks have a flat ring too
    [
        (2, {}),
        (1, {}),
        (3, {}),
        (4, {"ring": "two-level", "ranks_per_node": 2}),
        pytest.param(4, {}, marks=pytest.mark.slow),
    ],
)
def test_losses_equal_their_dense_float64_definition(world_size, options):
    cases = [case.on(world_size) for case in CASES]
    for case, result in zip(cases, over_ranks(cases, world_size, **options)):
        with_ids = case.duplicates != "negative" and case.captions is None or case.margin is not None
        bound = (
            1e-11 if case.dtype == FLOAT64 else 2e-5 if with_ids or case.captions or case.name == "nt_xent" else 1e-5
        )
        floors = dict.fromkeys(result._fields, 0.1 if with_ids or case.name == "info_nce" else 0.0)
        if case.name == "nt_xent":
            largest = case.scale / case.rows**0.5  # gradients vanish at perfect matches
            floors |= {"loss": 1.0, "d_images": largest, "d_texts": largest, "d_scale": 1.0}
        reference = oracle(case, world_size=world_size)
        for field in result._fields[: 5 if case.name == "siglip" else 4]:
            error = relative_error(getattr(result, field), getattr(reference, field), floors[field])
            assert error < bound, (case, field, error)


@pytest.mark.long
def test_losses_of_many_ranks_equal_them_over_two_level_rings():
    """With 32 ranks as on four nodes of eight GPUs."""
    world_size, ranks_per_node = 32, 8
    cases = [Case("inf_cl", 3 * world_size, 24, 50.0), Case("siglip", 2 * world_size, 7, 10.0, bias=-10.0)]
    for options in ({"ring": "two-level", "ranks_per_node": ranks_per_node}, {}):
        for case, result in zip(cases, over_ranks(cases, world_size, **options)):
            for field, value, expected in zip(result._fields, result, oracle(case)):
                if field != "d_bias" or case.name == "siglip":
                    assert relative_error(value, expected, floor=1e-3) < 1e-5, (case, options, field)


@pytest.mark.first(4)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32, torch.bfloat16])
def test_adversarial_features_stay_exact_and_finite(world_size, dtype):
    rows = world_size * {1: 37, 3: 11}[world_size]
    kinds = FEATURES if dtype == FLOAT64 else [kind for kind in FEATURES if kind != "long"]
    cases = [Case("inf_cl", rows, 40, scale, kind, dtype) for kind in kinds for scale in (1.0, 100.0)]
    # float32 logits near 100 are known to 1e-5, and so are probabilities: an absolute error of the gradients.
    tolerance = {FLOAT64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-3}[dtype]
    for case, result in zip(cases, over_ranks(cases, world_size)):
        reference, largest = oracle(case), case.scale / rows**0.5
        assert result.loss >= 0, case
        assert relative_error(result.loss, reference.loss, floor=1.0) < 3e-5, case
        for name, floor in (("d_images", largest), ("d_texts", largest), ("d_scale", 1.0)):
            assert relative_error(getattr(result, name), getattr(reference, name), floor) < tolerance, (case, name)


def test_adversarial_features_stay_exact_and_finite_in_siglip():
    for kind, (scale, bias) in itertools.product(FEATURES, ((10.0, -10.0), (100.0, 20.0))):
        case = Case("siglip", 31, 40, scale, kind, FLOAT64, bias)
        result, reference = evaluate(case), oracle(case)
        assert result.loss >= 0
        for name, value, expected in zip(result._fields, result, reference):
            assert relative_error(value, expected, floor=1e-6) < 1e-9, (case, name)


def test_matches_that_are_the_smallest_entries_stay_the_only_ones():
    """Every negative is above its match: the loss and its gradients vanish."""
    images = features("random", 9, 24, FLOAT64)[0]
    for value in (
        inf_cl_loss(images.requires_grad_(), -images.detach(), 100.0, margin=0.0),
        info_nce_loss(images, -images.detach(), torch.arange(9), 100.0, margin=0.0),
    ):
        gradient = torch.autograd.grad(value, images)[0]
        assert value == 0 and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_cosines_stay_whatever_their_rounding(dtype):
    images, texts = features("equal", 33, 40, dtype)
    kept, plain = (inf_cl_loss(images, texts, 100.0, margin=margin) for margin in (0.0, None))
    assert kept == plain


@pytest.mark.parametrize(
    "case",
    [
        Case("inf_cl", 40, 256, 100.0, "apart"),
        Case("siglip", 40, 256, 100.0, "aligned", bias=-45.0),
        Case("info_nce", 40, 256, 100.0, "apart", positives="in order"),
        Case("nt_xent", 20, 256, 100.0, "apart"),
    ],
    ids=lambda case: case.name,
)
def test_the_loss_of_separated_pairs_is_precise(case):
    """Relative to the tiny loss and gradients themselves, which a float32 LSE less the matched logit would not give."""
    reference, result = oracle(case), evaluate(case)
    assert 0 < reference.loss < 1e-4
    for field in ("loss", "d_images", "d_texts", "d_scale"):
        assert relative_error(getattr(result, field), getattr(reference, field)) < 1e-3, field


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", ["inf_cl", "siglip", "info_nce"])
def test_a_side_without_gradient_leaves_the_others_exact(name, needs):
    case = Case(name, 15, 24, 20.0, bias=-4.0)
    batch, reference = global_batch(case), oracle(case)
    sides = [side.requires_grad_(need) for side, need in zip(batch[:2], needs)]
    scale = torch.tensor([case.scale], requires_grad=True)
    loss = {
        "inf_cl": lambda: inf_cl_loss(*sides, scale),
        "siglip": lambda: siglip_loss(*sides, scale, case.bias),
        "info_nce": lambda: info_nce_loss(*sides, batch.positives[0], scale),
    }[name]()
    loss.backward()
    assert scale.grad.shape == (1,) and relative_error(scale.grad[0], reference.d_scale) < 1e-5
    for side, need, expected in zip(sides, needs, reference[1:3]):
        assert (side.grad is not None) == need
        assert not need or relative_error(side.grad, expected) < 1e-5


WIDE = Case("info_nce", 9, 40, 100.0, columns=13, positives="shared")


@pytest.mark.parametrize(
    "case, tile_dtype, least, most",
    [
        (WIDE._replace(dtype=FLOAT64), "fp32", 0.0, 1e-5),
        (WIDE, "fp64", 0.0, 1e-5),
        (Case("inf_cl", 33, 64, 20.0), "bf16", 1e-5, 2e-2),
        *((Case(name, 16, 32, 10.0, dtype=torch.bfloat16), None, 0.0, 5e-2) for name in ("clip", "open_clip", "disco")),
    ],
)
def test_gradients_have_the_dtype_of_the_features_whatever_is_multiplied(case, tile_dtype, least, most):
    result, reference = evaluate(case, tile_dtype=tile_dtype), oracle(case)
    assert result.d_images.dtype == result.d_texts.dtype == case.dtype
    assert case.columns or result.loss.dtype == torch.float32
    assert least <= relative_error(result.d_images, reference.d_images, floor=0.1 if case.columns else 0.0) < most
    assert relative_error(result.d_texts, reference.d_texts, floor=0.1 if case.columns else 0.0) < most
    assert relative_error(result.loss, reference.loss) < most


@pytest.mark.parametrize("name", ["inf_cl", "siglip", "info_nce"])
@pytest.mark.parametrize("weights", [None, [1, 0, 2.5]])
def test_a_matryoshka_loss_is_the_mean_of_the_losses_of_normalised_prefixes(name, weights):
    case = Case(name, 13, 24, 20.0, "near", FLOAT64, bias=-5.0, ids="none", positives="in order")
    sides = [side.requires_grad_() for side in global_batch(case)[:2]]
    loss = {
        "inf_cl": lambda a, b: inf_cl_loss(a, b, 20.0),
        "siglip": lambda a, b: siglip_loss(a, b, 20.0, -5.0),
        "info_nce": lambda a, b: info_nce_loss(a, b, torch.arange(13), 20.0),
    }[name]
    value = matryoshka(loss, [1, 7, 24], weights)(*sides)
    logits = [20 * F.normalize(a[:, :w]) @ F.normalize(b[:, :w]).T for w in (1, 7, 24) for a, b in [sides]]
    own = torch.arange(13)
    dense = {
        "inf_cl": lambda of: (F.cross_entropy(of, own) + F.cross_entropy(of.T, own)) / 2,
        "siglip": lambda of: -F.logsigmoid((2 * torch.eye(13) - 1) * (of - 5)).sum() / 13,
        "info_nce": lambda of: F.cross_entropy(of, own),
    }[name]
    shares = torch.tensor(weights or [1.0, 1.0, 1.0]).double()
    expected = torch.stack([dense(of) for of in logits]) @ (shares / shares.sum())
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
    for gradient, true in zip(*(torch.autograd.grad(of, sides) for of in (value, expected))):
        assert relative_error(gradient, true) < 1e-9


def test_a_feature_that_is_not_finite_is_seen_in_the_loss():
    for value in (math.inf, math.nan):
        images, texts = torch.full((2, 3, 4), 0.5)
        images[0, 0], texts[1:, 0] = value, -0.5  # inf in the match of the first pair alone
        assert inf_cl_loss(images, texts, 1.0).isnan()
        assert info_nce_loss(images, texts, torch.arange(3), 1.0).isnan()
        assert nt_xent_loss(images, texts, 1.0).isnan()


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


def test_upstream_gradient_multiplies_all_gradients():
    case = Case("inf_cl", 9, 24, 20.0)
    reference = oracle(case)
    images, texts = (f.requires_grad_() for f in features(case.kind, case.rows, case.dim))
    scale = torch.tensor(case.scale, requires_grad=True)
    (1024 * InfCLLoss()(images, texts, scale)).backward()
    for name, leaf in zip(("d_images", "d_texts", "d_scale"), (images, texts, scale)):
        assert relative_error(leaf.grad, 1024 * getattr(reference, name)) < 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    case, values = Case(name, 13, 24, 50.0, bias=-2.0), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            values.append(evaluate(case))
    # the backward of the dense baselines follows autocast, as open_clip's does
    for plain, cast in list(zip(*values))[: 5 if name in TILED else 1]:
        assert plain.dtype == cast.dtype == torch.float32 and torch.equal(plain, cast)


def test_double_backward_says_that_it_is_not_supported():
    images, texts = (f.requires_grad_() for f in features("random", 5, 24))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(inf_cl_loss(images, texts, 10.0), images, create_graph=True)


# ---- inputs that are rejected ----

ROWS, IMAGES, TEXTS = torch.eye(5, 8), *features("random", 5, 24)
TWO = torch.tensor([0, 1])
QUERIES, DOCUMENTS = torch.ones(2, 8), torch.ones(3, 8)
TEACHER = {"teacher_image_features": IMAGES, "teacher_text_features": TEXTS, "teacher_scale": 1.0}
MASK, IDS_MUST = {"duplicates": "mask"}, r"ids must be int64 \[5\], one per row; got "


def _with(**options):
    return partial(inf_cl_loss, options=RingOptions(**options))


@pytest.mark.parametrize(
    "loss, arguments, options, message",
    [
        (inf_cl_loss, (torch.zeros(4, 8), torch.zeros(5, 8), 1.0), {}, r"\(4, 8\), \(5, 8\)"),
        (inf_cl_loss, (torch.zeros(4, 8), torch.zeros(4, 9), 1.0), {}, r"\(4, 8\), \(4, 9\)"),
        (inf_cl_loss, (torch.zeros(0, 8), torch.zeros(0, 8), 1.0), {}, r"\(0, 8\)"),
        (inf_cl_loss, (torch.zeros(8), torch.zeros(8), 1.0), {}, r"\(8,\)"),
        (_with(tile="cuda"), (IMAGES, TEXTS, 1.0), {}, "unknown tile 'cuda'"),
        (_with(tile_dtype="int8"), (IMAGES, TEXTS, 1.0), {}, "'int8'"),
        (inf_cl_loss, (IMAGES, TEXTS, IMAGES), {}, r"\(5, 24\)"),
        (inf_cl_loss, (IMAGES, TEXTS.to("meta"), 1.0), {}, "on one device; got cpu, meta"),
        (_with(workspace_bytes=0), (IMAGES, TEXTS, 1.0), {}, "workspace_bytes 0 must be positive"),
        (_with(ring="two"), (IMAGES, TEXTS, 1.0), {}, "unknown ring 'two'"),  # of one rank as of several
        (_with(tile="triton"), (IMAGES, TEXTS, 1.0), {}, "needs features on a GPU, not on cpu"),
        (inf_cl_loss, (IMAGES, TEXTS, 1.6e6), {}, "expected"),  # exp of what is the scale already
        (inf_cl_loss, (IMAGES, TEXTS, math.nan), {}, "^logit_scale is nan: a finite number"),
        (siglip_loss, (IMAGES, TEXTS, 1.0, math.inf), {}, "^logit_bias is inf: a finite number"),
        (distillation_loss, (IMAGES, TEXTS, 1.0), TEACHER | {"teacher_scale": 1e5}, "^teacher_scale is 100000: a"),
        (info_nce_loss, (QUERIES, DOCUMENTS, torch.tensor([1, 3]), 1.0), {}, r"1\.\.3; .* documents are 0\.\.2"),
        (info_nce_loss, (QUERIES, DOCUMENTS, torch.arange(3), 1.0), {}, r"\[2\]; got \(3,\)"),
        (info_nce_loss, (QUERIES, torch.ones(3, 9), TWO, 1.0), {}, r"\(2, 8\), \(3, 9\)"),
        (info_nce_loss, (QUERIES, DOCUMENTS, TWO.to("meta"), 1.0), {}, "on one device; got cpu, cpu, meta"),
        (captions_loss, (IMAGES[:4], torch.zeros(11, 24), 1.0), {"captions": 2}, "11 texts are not 2 or more of each"),
        (captions_loss, (IMAGES, TEXTS.repeat(3, 1), 1.0), {"captions": 3} | MASK, "leaves out all but one of the 3"),
        (captions_loss, (IMAGES, TEXTS, 1.0), MASK, r"'mask' needs ids \[5\]"),
        (inf_cl_loss, (ROWS, ROWS, 1.0), MASK, "'mask' needs ids"),
        (inf_cl_loss, (ROWS, ROWS, 1.0), {"margin": 2.5}, "margin 2.5 is a difference of two cosines, between -2 and"),
        (matryoshka(inf_cl_loss, [2, 9]), (ROWS, ROWS, 1.0), {}, "matryoshka widths 2 9: 9 is above the 8 dimensions"),
        (matryoshka, (inf_cl_loss, [4, 4]), {}, "widths 4 4 must ascend"),
        (matryoshka, (inf_cl_loss, [4, 8], [1, -1]), {}, "matryoshka weights 1 -1 do not fit matryoshka widths 4 8"),
        (matryoshka, (inf_cl_loss, [4, 8], [1, math.nan]), {}, "weights 1 nan do not fit matryoshka widths 4 8"),
        (matryoshka, (inf_cl_loss, [4, 8], [math.inf, 1]), {}, "weights inf 1 do not fit matryoshka widths 4 8"),
        (matryoshka, ([inf_cl_loss], [4, 8]), {}, "matryoshka: 1 losses for 2 widths"),
        (siglip_loss, (ROWS, ROWS, 1.0, 0.0), {"duplicates": "none"}, "duplicates is one of .*, not 'none'"),
        (siglip_loss, (ROWS, ROWS, 1.0, 0.0), MASK | {"ids": torch.arange(4)}, IDS_MUST + r"\(4,\) torch.int64"),
        (inf_cl_loss, (ROWS, ROWS, 1.0), MASK | {"ids": torch.arange(5).int()}, IDS_MUST + r"\(5,\) torch.int32"),
    ],
)
def test_wrong_inputs_are_rejected_with_the_numbers(loss, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        loss(*arguments, **options)


def _differ(rank, world_size):
    """Messages of calls in which the ranks differ. A rank that continued alone would hang or mix up rows."""
    group, first = {"group": torch.distributed.group.WORLD}, rank != 1
    images, texts = (side.requires_grad_() for side in features("random", 4, 8))
    locked = texts if first else texts.detach()
    half = torch.bfloat16 if first else torch.float16
    masked = {"ids": torch.arange(4), "duplicates": "mask"}
    calls = {
        "[4, 5, 6]": lambda: inf_cl_loss(*features("random", 4 + rank, 8), 1.0, **group),
        "'torch.bfloat16', 'torch.float16'": lambda: inf_cl_loss(images.to(half), texts.to(half), 1.0, **group),
        "same dtype of products": lambda: inf_cl_loss(
            images, texts, 1.0, options=RingOptions(tile_dtype="bf16" if first else "fp16"), **group
        ),
        "same tf32 products": lambda: inf_cl_loss(
            images, texts, 1.0, options=RingOptions(tile_dtype="fp32" if first else "tf32"), **group
        ),
        "inf_cl needs the same requires_grad of columns": lambda: inf_cl_loss(images, locked, 1.0, **group),
        "same duplicates='mask'": lambda: inf_cl_loss(
            images, texts, 1.0, **group, **(masked if first else masked | {"duplicates": "positive"})
        ),
        "same number of margin": lambda: inf_cl_loss(images, texts, 1.0, margin=0.1 if first else None, **group),
        "validity of inputs on every rank; ranks 0.. have [1, 0, 1]": lambda: info_nce_loss(
            images, texts, torch.arange(4) + (not first), 1.0, **group
        ),
        "distillation's teacher needs the same number of images": lambda: distillation_loss(
            images,
            texts,
            1.0,
            teacher_scale=1.0,
            teacher_image_features=images[not first :].detach(),
            teacher_text_features=texts[not first :].detach(),
            **group,
        ),
        "pass group=": lambda: inf_cl_loss(images, texts, 1.0),  # never silently local
    }
    return {message: rejected(call) for message, call in calls.items()}


def test_ranks_that_differ_are_rejected_on_every_rank():
    for rank, messages in enumerate(run_ranks(_differ, 3)):
        for expected, message in messages.items():
            assert message is not None and expected in message, (rank, expected, message)
            if "validity" in expected:
                assert ("positives are in 1..4; this rank's documents are 0..3" in message) == (rank == 1)
