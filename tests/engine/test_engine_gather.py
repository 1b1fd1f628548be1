"""ZeRO-3 gathers a model that fits once a step, and every forward sees the weights that it should."""

import pytest
import torch

from infcl.engine.engine import Engine
from tests.lib.collectives import collectives
from tests.lib.engine_steps import engine_on_cpu
from tests.lib.odd_clip import MICRO_BATCHES, odd_clip, pairs, preset_of
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR


def gathering_engine(preset: str, world_size: int, **changes) -> Engine:
    return engine_on_cpu(odd_clip(), "zero3", MICRO_BATCHES, deepspeed_config=preset, **changes)


def encode_and_replay(engine: Engine, rank: int, step: int) -> None:
    """Both passes of a step."""
    batches = [pairs(100 * step + 10 * rank + index) for index in range(MICRO_BATCHES)]
    engine.train()
    with torch.no_grad():
        for batch in batches:
            engine.encode(*batch)
    for index, batch in enumerate(batches):
        output = engine.encode(*batch)
        surrogate = (output["image_features"] * output["text_features"].roll(1, 0)).sum() + output["logit_scale"].sum()
        engine.backward(surrogate, index == MICRO_BATCHES - 1)


def whole_parameters(engine: Engine) -> int:
    """How many are gathered."""
    return sum(parameter.ds_status.name == "AVAILABLE" for parameter in engine.module.parameters())


def gathers_of_steps(rank, world_size, preset, step_count=3):
    """Of each step: gathers of its first forward, of all others and the backwards; parameters whole before and after
    the update; how many modules DeepSpeed's trace has then, by which it prefetches."""
    engine, found = gathering_engine(preset, world_size), []
    coordinator = engine.engine.optimizer.parameter_offload.get_param_coordinator()
    for step in range(step_count):
        engine.train()
        with torch.no_grad():
            first = collectives("gather", lambda: engine.encode(*pairs(0)))
        others = collectives("gather", lambda step=step: encode_and_replay(engine, rank, step))
        before = whole_parameters(engine)
        engine.step(LR)
        trace = len(coordinator._PartitionedParameterCoordinator__submodule_order) * coordinator.is_complete_trace()
        found.append((first, others, before, whole_parameters(engine), trace))
    return found, len(list(engine.module.parameters()))


PREFETCHES = {"all at once": {}, "in parts": {"stage3_prefetch_bucket_size": 20000}}
PERSISTENT = {"stage3_param_persistence_threshold": 1000} | PREFETCHES["in parts"]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [*PREFETCHES.values(), PERSISTENT], ids=[*PREFETCHES, "small ones stay"])
def test_what_fits_is_gathered_once_a_step(options, tmp_path):
    steps, parameters = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options))[0]
    for first, others, before, after, trace in steps:
        assert first > 0 and others == 0 and before == parameters
        assert 0 < after < parameters if options is PERSISTENT else after == 0
        assert trace == steps[0][-1] > 10, "a forward's modules, in every step"


IN_HOST_MEMORY = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "options",
    [{"stage3_max_live_parameters": 1000}, {"stage3_max_reuse_distance": 1000}, IN_HOST_MEMORY],
    ids=lambda options: next(iter(options)),
)
def test_a_model_above_a_limit_or_in_host_memory_is_gathered_again(options, tmp_path):
    steps, _ = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options), step_count=2)[0]
    assert all(first > 0 and others > 0 for first, others, *_ in steps)


def weights_and_evaluations(rank, world_size, preset, kept):
    """After three steps: the weights; and between them what evaluations saw, of the weights and of their average."""
    from infcl.checkpoint.load import full_weights

    engine, seen = gathering_engine(preset, world_size, ema_decay=0.5), []
    persistent = sum(parameter.ds_persist for parameter in engine.module.parameters())
    assert engine.kept.fits
    if not kept:
        engine.kept.fits = engine.kept.on = False
    for step in range(3):
        encode_and_replay(engine, rank, step)
        assert engine.step(LR)
        engine.state.update_average()
        engine.train(False)
        with torch.no_grad():
            seen.append(engine.encode(*pairs(1000))["image_features"])
            with engine.showing_average():
                seen.append(engine.encode(*pairs(1000))["image_features"])
            seen.append(engine.encode(*pairs(1000))["image_features"])
        if kept:  # DeepSpeed alone leaves what its trace of a step with backwards says is used again
            assert whole_parameters(engine) == persistent
    return full_weights(engine, keep=True), seen


@pytest.mark.first(1)
@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (3, {}), (2, PERSISTENT)])
def test_steps_and_evaluations_are_those_without_keeping_to_the_bit(world_size, options, tmp_path):
    preset = preset_of(tmp_path, **options)
    (weights, seen), (expected, beside) = (
        run_ranks(weights_and_evaluations, world_size, preset, kept)[0] for kept in (True, False)
    )
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(seen, beside, strict=True))
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def forward_after_a_write(rank, world_size, preset):
    """Features before and after a weight is written during a step, as a checkpoint's are; a fresh engine's with it."""
    engine, written = gathering_engine(preset, world_size), gathering_engine(preset, world_size)
    parameter = dict(engine.module.named_parameters())["visual.proj"]
    value = engine.state.read(parameter).flip(0)
    with torch.no_grad():
        before = engine.encode(*pairs(0))["image_features"]
        engine.state.write(parameter, value)
        written.state.write(dict(written.module.named_parameters())["visual.proj"], value)
        return before, engine.encode(*pairs(0))["image_features"], written.encode(*pairs(0))["image_features"]


def test_a_weight_that_is_written_while_all_is_kept_is_seen(tmp_path):
    before, after, expected = run_ranks(forward_after_a_write, 2, preset_of(tmp_path))[0]
    assert torch.equal(after, expected) and not torch.equal(before, after)


def steps_that_are_left_out(rank, world_size, preset):
    """(applied, parameters whole after it) of a step whose gradients are not finite, and of the next."""
    engine, found = gathering_engine(preset, world_size), []
    for step in range(2):
        encode_and_replay(engine, rank, step)
        if step == 0:
            engine.engine.optimizer.grad_partitions_flat_buffer[0] = float("nan")
        found.append((engine.step(LR), whole_parameters(engine)))
    return found


def test_a_step_that_is_left_out_releases_too(tmp_path):
    assert run_ranks(steps_that_are_left_out, 2, preset_of(tmp_path))[0] == [(False, 0), (True, 0)]
