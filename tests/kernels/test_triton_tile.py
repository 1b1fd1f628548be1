"""The Triton tile computes what the reference tile computes: in Triton's interpreter on a CPU, and on a GPU.

Each check takes a device and the dtypes of its features. On a CPU they run in a process of their own, since
TRITON_INTERPRET must be set before Triton is imported: `TRITON_INTERPRET=1 python -m tests.kernels.test_triton_tile`,
and the names of the dtypes. Without bf16 products; a GPU has them.
"""

import itertools
import math
import os
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from infcl import RingOptions, distillation_loss, inf_cl_loss, info_nce_loss, nt_xent_loss
from infcl.kernels import select_tile, torch_tile
from infcl.kernels.tile import Blocks, Gradients
from infcl.loss.inputs import rounded_to_tf32
from tests.lib.checkout import ROOT
from tests.lib.interpreter import replace_language_once
from tests.lib.live_bytes import TILED_LOSSES, require_constant_bytes_per_row
from tests.lib.loss_oracle import FEATURES, Case, evaluate, features, oracle, relative_error

TRITON = RingOptions(tile="triton")
SHAPES = ((1, 1, 24), (33, 70, 25), (150, 300, 40))


def _check_tile(device, rows, columns, dim, kind, scale, dtype, workspaces=(2**14, 2**22)):
    """Errors of the Triton tile and of the float32 reference tile, both against float64 of the same inputs."""
    row_features, column_features = features(kind, max(rows, columns), dim, dtype)
    row_features, column_features = row_features[:rows].to(device), column_features[:columns].to(device)
    wide = row_features.double(), column_features.double(), torch.tensor(scale, dtype=torch.float64, device=device)
    scale = wide[2].float()
    bias = torch.tensor(-2.0, device=device)
    tile = select_tile(row_features, tile="triton")
    # The gradient's error comes from rounding dS once to the operand type; float32 logits of 100 are good to 1e-5.
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-5}[dtype]
    for workspace_bytes, masked in itertools.product(workspaces, (True, False)):
        bounds = masked, workspace_bytes
        given, exact = Blocks(row_features, column_features, scale, *bounds), Blocks(*wide, *bounds)
        where = rows, columns, dim, kind, scale, dtype, bounds
        reference = torch_tile.softmax_forward(exact)
        for value, expected in zip(tile.softmax_forward(given), reference):
            assert value.dtype == torch.float32 and value.shape == expected.shape
            torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=3e-5)
        whole = torch_tile.softmax_forward(exact._replace(masked=False)) if masked else reference
        shift = 0.5 if masked else 12.0  # as of a larger, or much larger, batch
        row_lse, col_lse = whole[0] + shift, whole[1] + shift
        for columns_lse in (col_lse, None):  # None: the loss of the rows alone
            expected, value = _zeros(wide, torch.float64), _zeros(wide, torch.float32)
            for _ in range(
                2 if kind == "random" and columns_lse is not None else 1
            ):  # gradients are added to what is there
                torch_tile.softmax_backward(exact, row_lse, columns_lse, expected)
                tile.softmax_backward(
                    given, row_lse.float(), None if columns_lse is None else columns_lse.float(), value
                )
            for v, e in zip(value[:2], expected):
                error = relative_error(v, e, floor=1e-2 * math.exp(-shift))
                assert error < tolerance, (*where, columns_lse is None, error)
            _check_scale_gradient(value.scale, expected.scale, wide, math.exp(-shift))

        expected, value = _zeros(wide, torch.float64), _zeros(wide, torch.float32)
        sums = torch_tile.sigmoid_gradients(exact, bias.double(), expected)
        for got, true in zip(tile.sigmoid_gradients(given, bias, value), sums):
            torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-4)
        _check_scale_gradient(value.scale, expected.scale, wide, columns)
        for v, e in zip(value[:2], expected):
            error = relative_error(v, e, floor=1e-2)
            assert error < tolerance, (*where, error)


def _zeros(like, dtype):
    return Gradients(*(torch.zeros_like(x, dtype=dtype) for x in like))


def _check_scale_gradient(value, expected, wide, row_mass):
    """To float32's rounding of logits of 100: no term is rounded to the operand type. row_mass: a row's sum of dS."""
    cosines = (wide[0] @ wide[1].T).abs().max()
    assert abs(value - expected) <= 3e-5 * len(wide[0]) * row_mass * cosines + 1e-30, (value, expected)


def check_odd_shapes(device, dtypes):
    for rows, columns, dim in SHAPES:
        for dtype in dtypes:
            workspaces = (2**14, 2**22) if 4 * rows * columns > 2**14 else (2**22,)  # of several chunks, or of one
            _check_tile(device, rows, columns, dim, "random", 20.0, dtype, workspaces)


def check_adversarial_features(device, dtypes):
    for kind, dtype in itertools.product(FEATURES, dtypes):
        if dtype == torch.float32:
            _check_tile(device, 70, 70, 24, kind, 100.0 if kind != "long" else 0.001, dtype, workspaces=(2**22,))
        elif kind != "long":  # their norms are no float16
            _check_tile(device, 40, 40, 24, kind, 100.0, dtype, workspaces=(2**22,))


def check_features_that_start_anywhere_in_memory(device, dtypes):
    """Not at a multiple of 16 bytes: a slice of a flat buffer. Equal bits, but of float32 gradients on a GPU, where
    loads of another width add up in another order."""
    for dtype in {*dtypes} & {torch.float16, torch.float32}:
        flat = torch.cat([side.flatten() for side in features("random", 6, 24, dtype)]).to(device)
        shifted = torch.cat([flat[:1], flat])[1:]
        (expected, d_expected), (value, d_value) = (
            (loss.detach(), torch.autograd.grad(2.0**10 * loss, buffer)[0])
            for buffer in (flat.requires_grad_(), shifted.requires_grad_())
            for loss in [inf_cl_loss(*buffer.view(2, 6, 24), 10.0, options=TRITON)]
        )
        rounding = (
            {"rtol": 1e-5, "atol": 1e-4} if (device, dtype) == ("cuda", torch.float32) else {"rtol": 0, "atol": 0}
        )
        assert torch.equal(value, expected)
        torch.testing.assert_close(d_value, d_expected, **rounding)


def check_a_workspace_of_one_byte(device, dtypes):
    images, texts = (side.to(device) for side in features("random", 20, 24))
    small, usual = (
        inf_cl_loss(images.requires_grad_(), texts, 10.0, options=RingOptions("triton", workspace_bytes=size))
        for size in (1, 2**20)
    )
    gradients = [torch.autograd.grad(loss, images)[0] for loss in (small, usual)]
    torch.testing.assert_close((small, gradients[0]), (usual, gradients[1]))


def check_scales_of_one_and_below(device, dtypes):
    for scale in (0.0, 1.0, -30.0) if torch.float32 in dtypes else ():
        _check_tile(device, 70, 70, 24, "random", scale, torch.float32, workspaces=(2**22,))


def check_huge_norms_stay_finite(device, dtypes):
    for norm in (1e3, 1e15):
        images, texts = (norm * f.to(device) for f in features("random", 33, 24))
        images.requires_grad_(), texts.requires_grad_()
        positives = torch.arange(len(images), device=device)
        for loss in (
            inf_cl_loss(images, texts, 100.0, options=TRITON),
            info_nce_loss(images, texts, positives, 100.0, options=TRITON),
            nt_xent_loss(images, texts, 100.0, options=TRITON),
        ):
            gradients = torch.autograd.grad(loss, (images, texts))
            assert loss.isfinite() and loss >= 0
            assert gradients[0].isfinite().all() and gradients[1].isfinite().all()


def check_whole_loss(device, dtypes):
    for name in ("inf_cl", "siglip"):
        for kind in ("random", "aligned"):
            case = Case(name, 70, 40, 50.0, kind, bias=-5.0)
            reference = oracle(case)
            result = evaluate(case, device=device, tile="triton", workspace_bytes=2**20)
            assert result.loss >= 0
            for field in ("loss", "d_images", "d_texts", "d_scale", "d_bias"):
                # Logits near 50 are good to 4e-6, and so are probabilities: errors relative to the largest value.
                floor = case.scale / case.rows**0.5 if field in ("d_images", "d_texts") else 1.0
                error = relative_error(getattr(result, field), getattr(reference, field), floor)
                assert error < 1e-5, (case, field, error)


def check_tails_are_precise(device, dtypes):
    """Losses next to nothing, relative to themselves: pairs told apart, and SigLIP's far below its bias."""
    for name, kind, bias in (("inf_cl", "apart", 0.0), ("siglip", "aligned", -30.0), ("siglip", "aligned", -45.0)):
        case = Case(name, 40, 256, 100.0, kind, bias=bias)
        reference, result = oracle(case), evaluate(case, device=device, tile="triton", workspace_bytes=2**20)
        assert 0 < reference.loss < 1e-2
        assert relative_error(result.loss, reference.loss) < 1e-3, (case, result.loss, reference.loss)
        assert relative_error(result.d_images, reference.d_images) < 1e-3, case


def check_gradients_of_sixteen_bit_features(device, dtypes):
    """Off by 2e-3 at most, with the loss multiplied as fp16 trainings do: fp16 hardly holds gradients of 1e-8."""
    for dtype in {*dtypes} - {torch.float32}:
        for kind in ("random", "training", "apart"):
            images, texts = (side.to(device).requires_grad_() for side in features(kind, 150, 100, dtype))
            loss = inf_cl_loss(images, texts, 100.0, options=RingOptions("triton", workspace_bytes=2**16))
            value = torch.autograd.grad(2.0**16 * loss, (images, texts))
            reference = oracle(Case("inf_cl", 150, 100, 100.0, kind, dtype))
            for gradient, true in zip(value, (reference.d_images, reference.d_texts)):
                error = relative_error(gradient.cpu().double() / 2**16, true)
                assert error < 2e-3, (dtype, kind, error)


def _check_losses(device, rows, dim, dtype, workspace_bytes, kind="random"):
    """Every other loss, and with ids."""
    options = {"kind": kind, "dtype": dtype, "bias": -5.0, "workspace_bytes": workspace_bytes}
    shared = {"columns": rows * 6 // 7, "positives": "shared"}  # documents that several queries share
    exact = {"kind": "grid"} if kind == "random" else {}  # of cosines next to a limit rounding would decide
    cases = [Case("info_nce", rows, dim, 30.0, **options | shared), Case("nt_xent", rows, dim, 30.0, **options)]
    cases += [Case(name, rows, dim, 30.0, **options | exact, margin=0.05) for name in ("inf_cl", "siglip")]
    cases += [Case("info_nce", rows, dim, 30.0, **options | shared | exact, margin=0.05)]
    for mode in ("mask", "positive"):
        given = options | {"duplicates": mode, "ids": "few"}
        cases += [Case(name, rows, dim, 30.0, **given) for name in ("inf_cl", "siglip")]
        cases += [Case(name, rows, dim, 30.0, **given | exact, margin=-0.05) for name in ("inf_cl", "siglip")]
        cases += [Case("info_nce", rows, dim, 30.0, **given, positives="shared")]
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-5}[dtype]
    for case in cases:
        reference, result = oracle(case), evaluate(case, device=device, tile="triton")
        for field in result._fields[: 5 if case.name == "siglip" else 4]:
            floor = 1e-2 if kind == "random" else 1.0  # else it cancels
            error = relative_error(getattr(result, field), getattr(reference, field), floor)
            assert error < (tolerance if field in ("d_images", "d_texts") else 2e-5), (case, field, error)


def check_other_losses_and_ids(device, dtypes):
    for dtype in dtypes:
        _check_losses(device, 150, 40, dtype, 2**14)
        if dtype != torch.float32:  # with a margin the forward walks the tiles before, on and after the diagonal
            case = Case("inf_cl", 600, 40, 30.0, "grid", dtype, workspace_bytes=2**24, margin=0.05)
            reference, result = oracle(case), evaluate(case, device=device, tile="triton")
            assert relative_error(result.loss, reference.loss) < 2e-5, dtype
            for value, true in ((result.d_images, reference.d_images), (result.d_texts, reference.d_texts)):
                assert relative_error(value, true, 1e-2) < {torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype], dtype
    if torch.float32 in dtypes:
        _check_losses(device, 70, 24, torch.float32, 2**20, "opposite")  # statistics are repaired


def check_entries_far_above_their_match_leave_nothing_behind(device, dtypes):
    """A margin leaves out all negatives, whose exponentials relative to the match overflow."""
    for dtype in dtypes:
        images = features("random", 70, 40, dtype)[0].to(device)
        for loss in (inf_cl_loss, partial(info_nce_loss, positives=torch.arange(70, device=device))):
            sides = images.clone().requires_grad_(), (-images).requires_grad_()
            value = loss(*sides, logit_scale=100.0, margin=0.0, options=TRITON)
            assert value == 0 and not any(gradient.any() for gradient in torch.autograd.grad(value, sides)), dtype


def check_distillation(device, dtypes):
    """In chunks and in one; with the cancellation of a student that is close to its teacher, too."""
    kinds = [(dtype, 2**14) for dtype in dtypes] + [(torch.float32, 2**22)] * (torch.float32 in dtypes)
    for dtype, workspace_bytes in kinds:
        for teacher_kind, tolerance in (("random", 1e-3), ("training", 4e-3)):
            sides = [side.to(device) for side in features("training", 150, 40, dtype)]
            teacher = [side.to(device) for side in features(teacher_kind, 150, 24, dtype, seed=1)]
            if teacher_kind == "training":  # the student, slightly moved
                teacher = [(side + 0.003 * side.roll(1, 0)).to(dtype) for side in sides]
            results = []
            for tile, width in (("triton", dtype), ("torch", torch.float64)):
                leaves = [side.to(width).clone().requires_grad_() for side in sides]
                options = RingOptions(tile, workspace_bytes=workspace_bytes)
                given = dict(zip(("teacher_image_features", "teacher_text_features"), (t.to(width) for t in teacher)))
                value = distillation_loss(*leaves, 50.0, **given, teacher_scale=60.0, options=options)
                results.append([value.detach(), *torch.autograd.grad(value * 2**10, leaves)])
            assert abs(results[0][0] - results[1][0]) < 1e-4, (dtype, teacher_kind, results[0][0], results[1][0])
            for gradient, true in zip(results[0][1:], results[1][1:]):
                bound = 4 * tolerance if dtype == torch.bfloat16 else tolerance
                assert relative_error(gradient, true) < bound, (dtype, workspace_bytes, teacher_kind)


def check_bytes_per_row_are_constant(device, dtypes):
    """With the launches of a GPU of 132 multiprocessors, whose programs share columns."""
    of_each_kind = ("inf_cl", "inf_cl, duplicates as positives", "siglip")  # of launches
    with (
        mock.patch("infcl.kernels.triton_forward.multiprocessors", return_value=132),
        mock.patch("infcl.kernels.triton_backward.multiprocessors", return_value=132),
    ):
        for name in TILED_LOSSES if device == "cuda" else of_each_kind:
            require_constant_bytes_per_row(name, "triton", device)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_triton_tile_is_exact_in_the_interpreter(dtype):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_triton_tile", dtype],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check):
    check("cuda", (torch.float16, torch.float32, torch.bfloat16))


@pytest.mark.gpu
def test_results_are_bitwise_repeatable_on_a_gpu():
    """Of every loss; many queries share a document, whose gradient sums their parts."""
    options = {"dtype": torch.float16, "bias": -5.0, "workspace_bytes": 2**16}
    cases = [Case(name, 300, 40, 50.0, **options) for name in ("inf_cl", "siglip", "nt_xent")]
    cases += [Case("info_nce", 300, 40, 50.0, **options, columns=20, positives="shared")]
    cases += [Case("inf_cl", 300, 40, 50.0, **options, ids="one", duplicates="positive")]
    for case in cases:
        first, *others = (evaluate(case, device="cuda", tile="triton") for _ in range(3))
        assert all(torch.equal(a, b) for again in others for a, b in zip(first, again)), case


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 100, 512, 640, 768, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_odd_blocks_on_a_gpu(dim, dtype):
    _check_tile("cuda", 1537, 2049, dim, "random", 100.0, dtype, workspaces=(2**21, 2**28))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 100, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_odd_blocks_with_ids_on_a_gpu(dim, dtype):
    _check_losses("cuda", 1537, dim, dtype, 2**21)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "training", "near", "aligned"])
def test_low_precision_gradients_are_as_good_as_the_dense_ones(kind):
    """Against float64 of the same inputs, relative to about the largest possible gradient; and to their own norm where
    that is not the result of a cancellation (near-duplicates, perfect matches).
    """
    scale = 100.0 if kind == "training" else 50.0
    case = Case("inf_cl", 4096, 768, scale, kind, torch.bfloat16, workspace_bytes=2**28)
    reference, result = oracle(case), evaluate(case, device="cuda")
    dense = evaluate(case._replace(name="clip"), device="cuda")
    for field in ("d_images", "d_texts"):
        value, peer, expected = (getattr(evaluation, field) for evaluation in (result, dense, reference))
        floor = case.scale / case.rows**0.5
        assert relative_error(value, expected, floor) <= 1.1 * relative_error(peer, expected, floor) + 1e-4
        assert kind not in ("random", "training") or relative_error(value, expected) < 2e-3
    floor = 0.0 if kind in ("random", "training") else 1.0  # of the others the gradient vanishes
    assert relative_error(result.d_scale, reference.d_scale, floor) < 1e-4


@pytest.mark.gpu
def test_a_captured_graph_replays_the_step():
    images, texts = (f.cuda().bfloat16().requires_grad_() for f in features("random", 1000, 64))
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)
    inputs = (images, texts, scale)

    def step():
        loss = inf_cl_loss(*inputs)
        return loss, *torch.autograd.grad(loss, inputs)

    expected = [value.detach().clone() for value in step()]  # a graph kept alive would keep its stream too
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for value, before in zip(captured, expected):
        assert torch.equal(value, before)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "scale"), [("random", 50.0), ("training", 100.0)])
@pytest.mark.parametrize("name", ["inf_cl", "siglip"])
def test_tf32_products_bias_no_gradient_on_a_gpu(name, kind, scale):
    """Against float64 of the features rounded to tf32; of random ones as they are, too, where little cancels."""
    case = Case(name, 4096, 768, scale, kind, bias=-5.0, workspace_bytes=2**28)
    result = evaluate(case, device="cuda", tile_dtype="tf32")
    for reference in (oracle(case, rounded_to_tf32), *[oracle(case)] * (kind == "random")):
        assert relative_error(result.loss, reference.loss) < 1e-4
        assert relative_error(result.d_scale, reference.d_scale) < 1e-4
        for field in ("d_images", "d_texts"):
            assert relative_error(getattr(result, field), getattr(reference, field)) < 2e-3


@pytest.mark.gpu
def test_memory_is_the_workspace_plus_a_slope_in_the_rows():
    dim, workspace_bytes = 256, 32 * 2**20
    peaks = []
    for rows in (8192, 8192, 16384, 32768):  # the first call lets the library take its own memory
        images, texts = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        inf_cl_loss(images, texts, 10.0, options=RingOptions(workspace_bytes=workspace_bytes)).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert len(peaks) == 1 or peaks[-1] < workspace_bytes + 24 * rows * dim + 2**24
    assert peaks[3] - peaks[2] < 2.2 * (peaks[2] - peaks[1]) + 2**20


if __name__ == "__main__":
    replace_language_once()
    for check in CHECKS:
        check("cpu", [getattr(torch, name) for name in sys.argv[1:]])
        print(check.__name__, "passed")
