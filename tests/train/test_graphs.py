"""--cuda-graphs: a step by graphs is the one without, to the last bit. On a CPU the graphs are recorded operators."""

import math
from contextlib import nullcontext

import pytest
import torch

from infcl.config import TrainConfig, resolve
from infcl.loss.contrastive import ContrastiveLoss
from infcl.models.packing import texts_for_model
from infcl.report import read_metrics
from infcl.step.grad_cache import by_name, cached_step
from infcl.train import graphs
from infcl.train.graphs import graph_towers
from tests.lib.engine_steps import TOWERS, demo_batch, demo_model, engine_steps
from tests.lib.entry import alone, command
from tests.lib.ranks import run_ranks
from tests.lib.recorded_graphs import recorded_graphs

MICRO_BATCHES, SIZE, STEPS = 3, 8, 2
LOCKS = {
    "no": lambda model: None,
    "image": lambda model: model.lock_image_tower(),
    "part of text": lambda model: model.lock_text_tower(2),
}


def micro_batches(model, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches with packed captions; those of the first one are longer and fill more rows."""
    images, texts = (side.roll(seed, 0).split(SIZE) for side in demo_batch(MICRO_BATCHES * SIZE))
    longest = torch.full_like(texts[0], 7)
    longest[:, -1] = model.eos_id
    pack = texts_for_model(model.cfg.text_cfg, pack=True)
    return [{"images": i, **pack(t)} for i, t in zip(images, [longest, *texts[1:]])]


def steps(*, graphed: bool, locked="no", checkpointing=False, faulty: int | None = None):
    """Make steps of SGD on the demo model. The gradient of backward number `faulty` is infinite.

    Returns:
        Loss and gradients of each step; by tower the sums of gradients at the blocks' input; the model.
    """
    model = demo_model(activation_checkpointing=checkpointing)
    LOCKS[locked](model)
    found, backwards, sums = [], [], {tower: [] for tower in model.transformers}
    for tower, blocks in model.transformers.items():
        blocks.on_input_gradient = lambda gradient, tower=tower: sums[tower].append(gradient.sum())

    def backward(surrogate, is_last):
        (surrogate * (math.inf if len(backwards) == faulty else 1.0)).backward()
        backwards.append(is_last)

    with recorded_graphs() if graphed else nullcontext():
        if graphed:
            graph_towers(model)
        for step in range(STEPS):
            output = cached_step(
                micro_batches(model, step),
                encode=model,
                loss=by_name(ContrastiveLoss("inf_cl")),
                backward=backward,
                seeds=[10 * step + index for index in range(MICRO_BATCHES)],
            )
            trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
            found += [output.loss, *(parameter.grad.clone() for parameter in trained)]
            for parameter in trained:
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    return found, sums, model


def same(some, others) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize(
    ("locked", "checkpointing"), [("no", False), ("no", True), ("image", False), ("part of text", True)]
)
def test_steps_by_graphs_are_those_without(locked, checkpointing):
    """With patch dropout, captions of several shapes, and weights that change from step to step."""
    plain, plain_sums, _ = steps(graphed=False, locked=locked, checkpointing=checkpointing)
    found, sums, model = steps(graphed=True, locked=locked, checkpointing=checkpointing)
    assert same(found, plain) and all(same(sums[tower], plain_sums[tower]) for tower in sums)
    assert len(sums["text"]) == (0 if locked == "part of text" else STEPS * MICRO_BATCHES)
    tower = model.graphs["text"]
    assert len({shapes for _, shapes in tower.passes}) > 1
    replays = sum(found.forward.replays for found in tower.passes.values())
    assert replays == tower.forwards == STEPS * (2 * MICRO_BATCHES - 1)


def test_shapes_above_the_limit_run_without_a_graph(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_PASSES", 1)
    found, _, model = steps(graphed=True)
    assert same(found, steps(graphed=False)[0]) and len(model.graphs["text"].passes) == 1


def test_a_gradient_that_is_not_finite_is_found_in_its_micro_batch_alone():
    _, sums, _ = steps(graphed=True, faulty=1)
    for tower in sums:
        assert [bool(total.isfinite()) for total in sums[tower][:MICRO_BATCHES]] == [True, False, True]


@recorded_graphs()
def test_an_evaluation_captures_nothing():
    model = demo_model().eval()
    batch = micro_batches(model, 0)[0]
    plain = model(**batch)
    graph_towers(model)
    for name, value in model(**batch).items():
        assert torch.equal(value, plain[name])
    assert not any(tower.passes for tower in model.graphs.values())


@recorded_graphs()
def test_a_backward_whose_activations_are_overwritten_fails():
    model = demo_model().train()
    graph_towers(model)
    batches = micro_batches(model, 0)
    first, _ = (model.graphs["image"](batch["images"]) for batch in batches[:2])
    with pytest.raises(AssertionError, match="has overwritten the activations"):
        first.sum().backward()


@pytest.mark.first(1)
@pytest.mark.parametrize("preset", ["zero2", "zero1", "zero0"])
def test_every_stage_without_gathered_parameters_makes_the_same_step(preset):
    plain, graphed = (
        run_ranks(engine_steps, 2, TOWERS, preset, graphed=graphed, grad_checkpointing=True)[0].state
        for graphed in (False, True)
    )
    assert plain.keys() == graphed.keys() and same(list(graphed.values()), list(plain.values()))


@pytest.mark.parametrize(
    ("flags", "device", "reason"),
    [
        ({"resident_micro_batches": "2"}, "cuda", "caches no activations: leave out --resident-micro-batches 2"),
        ({}, "cpu", "needs a GPU"),
        ({"deepspeed_config": "zero3"}, "cuda", "ZeRO-3 gathers them: use zero1 or zero2"),
        ({"tensor_parallel_size": 2}, "cuda", "is not for --tensor-parallel-size 2"),
        ({"model": "open_clip:ViT-B-32"}, "cuda", "is for our own towers, not for --model open_clip:ViT-B-32"),
    ],
)
def test_what_graphs_cannot_do_is_a_usage_error(flags, device, reason):
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, cuda_graphs=True, **flags)
    with pytest.raises(ValueError, match=f"--cuda-graphs .*{reason}"):
        resolve(config, device=device)


def test_graphs_imply_the_activations_of_one_micro_batch():
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, cuda_graphs=True)
    assert resolve(config, device="cuda").flags.resident_micro_batches == "1"


@pytest.mark.gpu
def test_a_run_by_graphs_follows_the_one_without(demo_folder, tmp_path):
    """With activation checkpointing, patch dropout and compiled blocks."""
    flags = ["--device", "cuda", "--steps", "5", "--accum-freq", "4", "--save-frequency", "0", "--grad-checkpointing"]
    flags += ["--force-patch-dropout", "0.25", "--compile-blocks", "on"]
    found = {}
    for name, more in {"plain": [], "graphs": ["--cuda-graphs"]}.items():
        result = alone(command(demo_folder, tmp_path, "--name", name, *flags, *more), environment={})
        assert result.returncode == 0, result.stdout + result.stderr
        assert ("CUDA graphs" in result.stdout + result.stderr) == bool(more)
        records = read_metrics(tmp_path / name / "metrics.jsonl", "train")
        found[name] = [[record[key] for record in records] for key in ("loss", "grad_norm")]
    print(found)
    (losses, norms), (plain_losses, plain_norms) = found["graphs"], found["plain"]
    assert losses[0] == plain_losses[0] and norms[0] == pytest.approx(plain_norms[0], rel=1e-6)
    assert losses == pytest.approx(plain_losses, rel=1e-4) and norms == pytest.approx(plain_norms, rel=1e-3)
