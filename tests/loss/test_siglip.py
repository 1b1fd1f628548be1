"""The ring's sigmoid loss equals the dense float64 one: value, feature gradients, scale and bias gradients."""

import pytest
import torch

from tests.lib.loss_oracle import FEATURES, Case, averaged, evaluate, evaluate_on_rank, oracle, relative_error
from tests.lib.ranks import run_ranks

GRADIENTS = ("d_images", "d_texts", "d_scale", "d_bias")


def _over_ranks(cases, world_size):
    if world_size == 1:
        return [evaluate(case) for case in cases]
    return [averaged(list(results)) for results in zip(*run_ranks(evaluate_on_rank, world_size, cases, {}))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_sigmoid_loss_equals_the_dense_float64_loss(world_size):
    cases = [
        Case("siglip", 9 * world_size, dim, scale, bias=bias)
        for dim in (24, 640)
        for scale, bias in ((1.0, 0.0), (10.0, -10.0), (100.0, -5.0))
    ]
    for case, result in zip(cases, _over_ranks(cases, world_size)):
        reference = oracle(case)
        for name in ("loss", *GRADIENTS):
            assert relative_error(getattr(result, name), getattr(reference, name)) < 1e-5, (case, name)


def test_adversarial_features_stay_exact_and_finite():
    for kind in FEATURES:
        for scale, bias in ((10.0, -10.0), (100.0, 20.0)):
            case = Case("siglip", 31, 40, scale, kind, torch.float64, bias)
            result, reference = evaluate(case), oracle(case)
            assert result.loss >= 0
            for name in ("loss", *GRADIENTS):
                assert relative_error(getattr(result, name), getattr(reference, name), floor=1e-6) < 1e-9, (case, name)


def test_matched_pairs_far_on_the_right_side_have_a_small_positive_loss():
    result = evaluate(Case("siglip", 1, 24, 40.0, "aligned", bias=-10.0))
    torch.testing.assert_close(result.loss, torch.tensor(-30.0).exp(), rtol=1e-4, atol=0)
