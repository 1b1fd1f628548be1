"""The dense baselines obey the same law: averages over ranks equal the float64 single-process loss and gradients."""

import warnings

import pytest
import torch

from tests.lib.loss_oracle import Case, averaged, evaluate, evaluate_on_rank, oracle, relative_error
from tests.lib.ranks import run_ranks

DENSE = ("clip", "open_clip", "disco")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_dense_losses_average_to_the_float64_loss(world_size):
    cases = [Case(name, 7 * world_size, 40, scale) for name in DENSE for scale in (1.0, 100.0)]
    if world_size == 1:
        results = [evaluate(case) for case in cases]
    else:
        results = [averaged(list(r)) for r in zip(*run_ranks(evaluate_on_rank, world_size, cases, {}))]
    for case, result in zip(cases, results):
        reference = oracle(case)
        for name in ("loss", "d_images", "d_texts", "d_scale"):
            assert relative_error(getattr(result, name), getattr(reference, name)) < 1e-5, (case, name)


@pytest.mark.parametrize("name", DENSE)
def test_dense_losses_return_gradients_in_the_features_dtype(name):
    result = evaluate(Case(name, 16, 32, 10.0, dtype=torch.bfloat16))
    assert result.loss.dtype == torch.float32 and result.d_images.dtype == torch.bfloat16
    reference = oracle(Case(name, 16, 32, 10.0, dtype=torch.bfloat16))
    assert relative_error(result.d_images, reference.d_images) < 5e-2


def _warnings_of(rank, world_size, cases):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        evaluate_on_rank(rank, world_size, cases, {})
    return [str(warning.message) for warning in seen]


def test_no_rank_warns_of_collectives_that_torch_renamed():
    cases = [Case(name, 14, 40, 1.0) for name in (*DENSE, "inf_cl", "siglip")]
    assert run_ranks(_warnings_of, 2, cases) == [[], []]
