"""GELU of compiled code in 16 bits: every value there is, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from infcl.towers.gelu import _Gelu, gelu

HALF_A_PLACE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LEAST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}  # that is no subnormal


def every_value(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def truth(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, its derivative behind it. erfc, not 1 + erf, which has no digits left on the far side."""
    x = x.double()
    below = torch.special.erfc(-x / 2**0.5) / 2
    return x * below, below + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_is_the_true_one_but_for_rounding(dtype):
    x = every_value(dtype).requires_grad_()
    out = _Gelu.apply(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
    true_out, true_slope = truth(x.detach())
    error, slope_error = (out.detach().double() - true_out).abs(), (slope.double() - true_slope).abs()
    assert (error <= 1.05 * HALF_A_PLACE[dtype] * true_out.abs().clamp(min=LEAST[dtype])).all()
    assert (slope_error <= HALF_A_PLACE[dtype] * true_slope.abs() + 1.3e-5).all()  # of two, through zero


def test_what_is_not_finite_stays_so():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.bfloat16)
    assert not _Gelu.apply(x).isfinite().any()


@pytest.mark.parametrize(("dtype", "ours"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_it_is_of_compiled_16_bits_alone(dtype, ours):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    x = torch.linspace(-3, 3, 101).to(dtype).requires_grad_()
    assert torch.equal(gelu(x), F.gelu(x))
    torch._dynamo.reset()
    out = torch.compile(gelu, fullgraph=True, backend=backend)(x)
    assert ("autograd_function_apply" in graphs[0].code, "gelu" in graphs[0].code) == (ours, not ours)
    assert torch.equal(out, _Gelu.apply(x) if ours else F.gelu(x))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(_Gelu.apply(x).sum(), x)[0]) == ours


def test_an_exported_graph_has_torchs():
    module = torch.nn.Module()
    module.forward = gelu
    exported = torch.export.export(module, (torch.linspace(-3, 3, 101, dtype=torch.bfloat16),))
    assert "aten.gelu" in exported.graph_module.code
