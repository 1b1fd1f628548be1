"""Towers that send one half of a micro-batch while they compute the other have the numbers of the whole ones."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.tensor_parallel import global_batch, layout, new_model, settings, train_steps
from tests.test_graphs import Recomputing
from tests.test_megatron_engine import STEPS, check
from tests.test_megatron_towers import whole_values

ROWS = (6, 5)  # an odd micro-batch goes whole


def gradients(model, rows):
    """Of a fixed surrogate in float64 -> features and whole gradients by name."""
    images, texts = global_batch(rows, seed=5)
    with torch.no_grad():
        model(images.double(), texts)
    model.zero_grad()
    features = {"image": model.visual(images.double()), "text": model.encode_text(texts)}
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(f.shape, generator=generator, dtype=f.dtype) for f in features.values()]
    (sum((f * w).sum() for f, w in zip(features.values(), weights)) + 0 * model.logit_scale.sum()).backward()
    return {name: f.detach() for name, f in features.items()} | whole_values(model, lambda parameter: parameter.grad)


def in_halves(rank, world_size, compiles, graphed):
    from infcl.train.graphs import graph_towers
    from megatron_patches.halves import send_halves
    from megatron_patches.towers import split_towers

    results = []
    for rows in ROWS:
        model = new_model().double()
        split_towers(model, layout(world_size).tp_group)
        send_halves(model, compiles=compiles)
        if graphed:
            graph_towers(model, Recomputing)
        results.append(gradients(model, rows))
    return results


@pytest.mark.parametrize(
    ("compiles", "graphed"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.slow)],
    ids=["graphed", "compiled"],
)
def test_towers_in_halves_have_the_features_and_gradients_of_the_whole_ones(compiles, graphed):
    expected = [gradients(new_model().double(), rows) for rows in ROWS]
    for results in run_ranks(in_halves, 2, compiles, graphed, timeout=200):
        for got, whole in zip(results, expected):
            torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)


def sequence(rank, world_size):
    from megatron_patches.halves import send_halves
    from megatron_patches.towers import split_towers

    model = new_model()
    split_towers(model, layout(world_size).tp_group, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence parallelism"):
        send_halves(model, compiles=False)


def test_what_does_not_go_with_halves_is_refused():
    run_ranks(sequence, 2)


def graphed_steps(rank, world_size, preset):
    from infcl.train.checkpoint import full_weights
    from infcl.train.graphs import graph_towers
    from megatron_patches.halves import send_halves

    def placed(model):
        send_halves(model, compiles=False)
        graph_towers(model, Recomputing)

    engine, *values = train_steps(layout(2), settings(preset, 2), STEPS, placed=placed)
    return *values, full_weights(engine, keep=True)


@pytest.mark.parametrize("preset", ["zero1", *(pytest.param(f"zero{n}", marks=pytest.mark.slow) for n in (0, 2))])
def test_steps_of_graphed_halves_equal_the_single_process_ones(preset):
    check(run_ranks(graphed_steps, 4, preset), 2)
