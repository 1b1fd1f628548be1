"""The loss on 32 ranks, as on four nodes of eight GPUs: flat and two-level rings equal the float64 loss."""

from tests.lib.loss_oracle import Case, averaged, evaluate, oracle, relative_error
from tests.lib.ranks import run_ranks

WORLD_SIZE = 32
TWO_LEVEL = {"ring": "two-level", "ranks_per_node": 8}
CASES = [
    (Case("inf_cl", WORLD_SIZE * 3, 24, 50.0), {}),
    (Case("inf_cl", WORLD_SIZE * 3, 24, 50.0), TWO_LEVEL),
    (Case("siglip", WORLD_SIZE * 2, 7, 10.0, bias=-10.0), TWO_LEVEL),
]


def evaluate_all(rank, world_size):
    return [evaluate(case, rank, world_size, **options) for case, options in CASES]


def test_losses_of_32_ranks_average_to_the_float64_loss():
    for (case, options), *results in zip(CASES, *run_ranks(evaluate_all, WORLD_SIZE)):
        reference, result = oracle(case), averaged(results)
        for field, value, expected in zip(reference._fields, result, reference):
            if field != "d_bias" or case.name == "siglip":
                assert relative_error(value, expected, floor=1e-3) < 2e-5, (case, options, field)
