"""tf32 operands are float32 features rounded to nearest, so that no gradient is biased by what tensor cores cut off."""

import math

import pytest
import torch

from infcl.kernels import select_tile
from infcl.loss.inputs import RingOptions, as_operand, rounded_to_tf32
from tests.lib.loss_oracle import LIBRARY, Case, evaluate, features, oracle, relative_error

BITS = 11  # of a tf32 number, the leading one included


def _rounded_in_float64(value: float) -> float:
    """To nearest, ties to even, with 11 bits; below 2^-126 in steps of 2^-136."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1], -125) - BITS
    return math.copysign(math.ldexp(round(math.ldexp(value, -exponent)), exponent), value)


def test_features_are_rounded_to_the_nearest_tf32_number():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=generator) * 10.0 ** torch.randint(-44, 38, (2000,), generator=generator)
    ties = torch.tensor([2**11 + 1, 2**11 + 3, -(2**11) - 1, 2**12 - 1, 2**11, 0.0, -0.0])  # 12 bits where odd
    for tested in (values, ties, ties * 2.0**-149, ties * 2.0**-13):
        expected = torch.tensor([_rounded_in_float64(value) for value in tested.tolist()])
        before = tested.clone()
        assert torch.equal(rounded_to_tf32(tested).view(torch.int32), expected.view(torch.int32))
        assert torch.equal(tested, before)


def test_what_is_not_finite_or_would_become_so_stays():
    largest = 2.0**128 - 2.0**117  # of tf32
    patterns = [0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, 0x7F7FFFFF, 0x7F7FF000, -0x800001]
    kept = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert torch.equal(rounded_to_tf32(kept).view(torch.int32), kept.view(torch.int32))
    below = torch.tensor([0x7F7FEFFF], dtype=torch.int32).view(torch.float32)
    assert rounded_to_tf32(below).item() == largest


def test_operands_are_contiguous_and_those_of_other_types_are_not_rounded():
    values, _ = features("random", 5, 24)
    for tile_dtype, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        assert torch.equal(as_operand(values, select_tile(values, tile_dtype=tile_dtype)), values.to(dtype))
    strided = torch.randn(6, 10, dtype=torch.float64)[:, ::2]
    assert as_operand(strided, select_tile(strided, tile_dtype="tf32")).is_contiguous()


@pytest.mark.parametrize("name", ["inf_cl", "siglip"])
def test_tf32_products_bias_no_gradient(name):
    """The scale's is 1.4e-3 off where operands are cut off; rounded ones leave what the features lose by chance."""
    case = Case(name, 1024, 768, 50.0, bias=-5.0, workspace_bytes=2**24)
    reference, result = oracle(case), evaluate(case, tile_dtype="tf32")
    assert relative_error(result.loss, reference.loss) < 1e-5
    assert relative_error(result.d_scale, reference.d_scale) < 2e-5
    for field in ("d_images", "d_texts"):
        assert 1e-5 < relative_error(getattr(result, field), getattr(reference, field)) < 1e-3


@pytest.mark.parametrize("name", LIBRARY)
def test_all_tiled_losses_round(name):
    """Losses and gradients are those of rounded features, which fp32 takes as they are, and no others."""
    found = {}
    for tile_dtype, given in (("tf32", torch.clone), ("rounded", rounded_to_tf32), ("fp32", torch.clone)):
        sides = [given(side).requires_grad_() for side in features("random", 20, 24)]
        options = RingOptions(tile_dtype="tf32" if tile_dtype == "tf32" else "fp32")
        value = LIBRARY[name](*sides, group=None, options=options)
        found[tile_dtype] = [value.detach(), *torch.autograd.grad(value, sides)]
    assert all(map(torch.equal, found["tf32"], found["rounded"])) and found["tf32"][0] != found["fp32"][0]
