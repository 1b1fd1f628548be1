"""ZeRO-3 gathers a model that fits once a step, and every forward sees the weights that it should."""

import pytest
import torch

from infcl.engine.engine import Engine
from tests.lib.collectives import collectives
from tests.lib.engine_steps import engine_on_cpu
from tests.lib.odd_clip import MICRO_BATCHES, odd_clip, pairs, preset_of
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR


def gathering_engine(preset: str, **changes) -> Engine:
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


def gathers_of_steps(rank, world_size, preset, poisoned=None):
    """Of each of three steps: gathers of its first forward, of all others and the backwards; parameters whole before
    and after the update; how many modules DeepSpeed's trace has then, by which it prefetches; whether it was made. The
    gradients of step `poisoned` are not finite."""
    engine, found = gathering_engine(preset), []
    coordinator = engine.engine.optimizer.parameter_offload.get_param_coordinator()
    for step in range(3):
        engine.train()
        with torch.no_grad():
            first = collectives("gather", lambda: engine.encode(*pairs(0)))
        others = collectives("gather", lambda step=step: encode_and_replay(engine, rank, step))
        before = whole_parameters(engine)
        if step == poisoned:
            engine.engine.optimizer.grad_partitions_flat_buffer[0] = float("nan")
        applied = engine.step(LR)
        trace = len(coordinator._PartitionedParameterCoordinator__submodule_order) * coordinator.is_complete_trace()
        found.append((first, others, before, whole_parameters(engine), trace, applied))
    return found, len(list(engine.module.parameters()))


PREFETCHES = {"all at once": {}, "in parts": {"stage3_prefetch_bucket_size": 20000}}
PERSISTENT = {"stage3_param_persistence_threshold": 1000} | PREFETCHES["in parts"]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [*PREFETCHES.values(), PERSISTENT], ids=[*PREFETCHES, "small ones stay"])
def test_what_fits_is_gathered_once_a_step(options, tmp_path):
    poisoned = None if options is PERSISTENT else 1  # what persists is gathered behind an update that is made
    steps, parameters = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options), poisoned)[0]
    for first, others, before, after, trace, _ in steps:
        assert first > 0 and others == 0 and before == parameters
        assert 0 < after < parameters if options is PERSISTENT else after == 0, "also where the step is skipped"
        assert trace == steps[0][-2] > 10, "a forward's modules, in every step"
    assert [applied for *_, applied in steps] == [step != poisoned for step in range(3)]


IN_HOST_MEMORY = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"stage3_max_live_parameters": 1000}, {"stage3_max_reuse_distance": 1000}, IN_HOST_MEMORY],
    ids=lambda options: next(iter(options)),
)
def test_a_model_above_a_limit_or_in_host_memory_is_gathered_again(options, tmp_path):
    steps, _ = run_ranks(gathers_of_steps, 2, preset_of(tmp_path, **options))[0]
    assert all(first > 0 and others > 0 for first, others, *_ in steps)


def weights_and_evaluations(rank, world_size, preset, kept):
    """After three steps: the weights; and between them what evaluations saw, of the weights and of their average.

    At last, what a forward sees of a weight that is written between the passes of a step.
    """
    from infcl.checkpoint.load import full_weights

    engine, seen = gathering_engine(preset, ema_decay=0.5), []
    persistent = sum(parameter.ds_persist for parameter in engine.module.parameters())
    assert engine.kept.fits
    if not kept:
        engine.kept.fits = engine.kept.on = False

    @torch.no_grad()
    def see() -> None:
        seen.append(engine.encode(*pairs(1000))["image_features"])

    for step in range(3):
        encode_and_replay(engine, rank, step)
        assert engine.step(LR)
        engine.state.update_average()
        engine.train(False)
        see()
        with engine.showing_average():
            see()
        see()
        if kept:  # DeepSpeed alone leaves what its trace of a step with backwards says is used again
            assert whole_parameters(engine) == persistent
    engine.train()
    see()
    parameter = dict(engine.module.named_parameters())["visual.proj"]
    engine.state.write(parameter, engine.state.read(parameter).flip(0))
    see()
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
    assert not torch.equal(seen[-2], seen[-1]), "a weight that is written while all is kept is seen"
