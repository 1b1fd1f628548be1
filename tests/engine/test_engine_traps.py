"""What DeepSpeed does silently wrong when asked in the obvious way, held on our engine: each test is one trap."""

import json
from unittest import mock

import pytest
import torch

from tests.lib.collectives import collectives
from tests.lib.engine_steps import engine_on_cpu
from tests.lib.fp16 import fp16_allowed
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR, ToyCLIP, global_batch


def _backward(engine, images, texts, last=True):
    output = engine.encode(images, texts)
    surrogate = (output["image_features"] * output["text_features"]).sum() + output["logit_scale"].sum()
    engine.backward(surrogate, last)


def waits_for_the_device(rank, world_size, preset):
    """How often DeepSpeed waits for the whole device in each of four steps of two micro-batches."""
    from deepspeed.accelerator import get_accelerator

    engine, waits = engine_on_cpu(ToyCLIP(), preset, 2, grad_clip_norm=None, wd=0.0), []
    for _ in range(4):
        with mock.patch.object(type(get_accelerator()), "synchronize") as synchronize:
            for index in range(2):
                _backward(engine, *global_batch(4, seed=10 * rank + index), last=index == 1)
        waits.append(synchronize.call_count)
        engine.step(LR)
    return waits


@pytest.mark.first(1)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero3"])
def test_the_host_waits_for_the_device_before_no_forward(preset):
    """By default DeepSpeed does from the third step on, to time it: what the host was ahead by is lost each time."""
    assert run_ranks(waits_for_the_device, 1, preset) == [[0, 0, 0, 0]]


def count_reductions(rank, world_size, preset, precision, micro_batches):
    """How many reducing collectives the backwards of one step start."""
    engine = engine_on_cpu(ToyCLIP(), preset, micro_batches, precision=precision, grad_clip_norm=None)

    def backwards() -> None:
        for index in range(micro_batches):
            _backward(engine, *global_batch(4, seed=index), last=index == micro_batches - 1)

    reductions = collectives("reduce", backwards)
    engine.step(LR)
    return reductions


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("preset", "precision"),
    [*((f"zero{stage}", "fp32") for stage in range(4)), ("zero0", "amp_bf16"), ("zero1", "bf16")],
)
def test_gradients_are_reduced_once_a_step_where_deepspeed_allows_it(preset, precision):
    """Stages 0 and 1 reduce every gradient once a step; 2 and 3, which keep no whole gradients, at each micro-batch."""
    counts = [run_ranks(count_reductions, 2, preset, precision, micro_batches)[0] for micro_batches in (1, 4)]
    assert counts == ([1, 1] if preset in ("zero0", "zero1") else [1, 4])


def gathers_of_a_backward(rank, world_size, preset):
    """Gathering collectives in the last backward of a step that encodes without graphs first, then with them."""
    engine = engine_on_cpu(ToyCLIP(), "zero3", 4, grad_clip_norm=None, deepspeed_config=preset)
    batch = global_batch(4)
    with torch.no_grad():
        for _ in range(4):
            engine.encode(*batch)
    for _ in range(3):
        _backward(engine, *batch, last=False)
    gathers = collectives("gather", lambda: _backward(engine, *batch, last=True))
    engine.step(LR)
    return gathers


def test_stage_3_gathers_nothing_again_in_a_backward_that_follows_its_forward(tmp_path):
    """What the passes without a graph released at once was cached, and released at once ever after."""
    preset = tmp_path / "preset.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1}
    zero["stage3_max_live_parameters"] = 100  # so that a step does not keep what it gathers
    preset.write_text(json.dumps({"zero_optimization": zero}))
    forward = len(list(ToyCLIP().parameters()))
    assert run_ranks(gathers_of_a_backward, 2, str(preset))[0] <= forward


def fp16_on_a_cpu(rank, world_size, preset, finite):
    """Seven steps in fp16: [(applied, loss scale after, gradient norm)], weights, counters, a restored loss scale."""
    from infcl.checkpoint.load import full_weights

    with fp16_allowed():
        options = {"deepspeed_config": preset, "precision": None, "grad_clip_norm": None, "wd": 0.0}
        engine = engine_on_cpu(ToyCLIP(logit_scale=1.0), "", 1, 5, **options)
    images, texts = (side[5 * rank : 5 * rank + 5] for side in global_batch(5 * world_size))
    steps = []
    for _ in range(7):
        output = engine.encode(images, texts)
        total = (output["image_features"] * output["text_features"]).sum() + output["logit_scale"].sum()
        engine.backward(total if finite else total * torch.inf, True)
        applied = engine.step(LR)
        steps.append((applied, engine.loss_scale(), float(engine.norms[2])))
    counters = engine.counters()
    engine.set_counters(counters | {"cur_scale": 2.0})  # as those of another checkpoint
    return steps, full_weights(engine, keep=True), counters, engine.loss_scale()


@pytest.mark.first(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_growing_loss_scale_changes_no_step(stage, tmp_path):
    """A power of two more or less rounds nothing: the steps are those of a static scale, to the last bit."""
    results = {}
    for name, fp16 in (
        ("static", {"loss_scale": 64}),
        ("growing", {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": {"enabled": True} | fp16}))
        results[name] = run_ranks(fp16_on_a_cpu, 2, str(path), True)[0]
    (static, weights, counters, restored), (growing, same, counters_of_growing, restored_growing) = results.values()
    assert [scale for _, scale, _ in growing] == [16, 16, 32, 32, 64, 64, 128]
    assert [norm for *_, norm in growing] == [norm for *_, norm in static] and all(applied for applied, *_ in static)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert counters_of_growing["cur_scale"] == 128 and "cur_scale" not in counters
    assert (restored, restored_growing) == (64, 2), "a static loss scale is the preset's"


def test_at_the_least_loss_scale_steps_are_skipped_on(tmp_path):
    """DeepSpeed's own error would end the run before the trainer does, without a checkpoint."""
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
    (tmp_path / "p.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": fp16}))
    steps, _, counters, _ = run_ranks(fp16_on_a_cpu, 2, str(tmp_path / "p.json"), False)[0]
    assert steps == [(False, max(1, 4 / 2**n), torch.inf) for n in range(1, 8)]
    assert counters["skipped_steps"] == 7 and counters["optimizer_step"] == 0


def error_of_the_mean(rank, world_size, preset, precision):
    """Largest relative error of this rank's part of any parameter's gradient, against the float64 mean of what the
    ranks' backwards give on a copy of the model. Three micro-batches, other pairs on each rank."""
    copy = ToyCLIP(logit_scale=1.0).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    options = {"precision": precision, "grad_clip_norm": None, "wd": 0.0}
    engine, weights = engine_on_cpu(ToyCLIP(logit_scale=1.0), preset, 3, **options), torch.linspace(-1, 2, 8)
    mean = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in copy.named_parameters()}

    def total(output):
        return sum((output[name] * weights).sum() for name in ("image_features", "text_features", "logit_scale"))

    for index in range(3):
        pairs = global_batch(4, seed=3 * rank + index)
        engine.backward(total(engine.encode(*pairs)), index == 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
            copy.zero_grad(), total(copy(*pairs)).backward()
        for name, parameter in copy.named_parameters():
            mean[name] += parameter.grad.double() / world_size
    errors = [0.0]
    for name, parameter in engine.state.parameters():
        torch.distributed.all_reduce(mean[name])
        own, piece = engine._own_gradient(parameter), engine.state.pieces[parameter]
        if piece.numel:
            reference = mean[name].flatten()[piece.start : piece.start + piece.numel]
            got = own.double().flatten()[: piece.numel]  # stage 3 pads
            errors.append(float((got - reference).norm() / reference.norm()))
    return max(errors)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("preset", "precision"), [*((f"zero{stage}", "amp_bf16") for stage in range(4)), ("zero1", "bf16")]
)
def test_gradients_are_not_rounded_on_their_way_between_ranks(preset, precision):
    """By default DeepSpeed sends those of nn.Linear and nn.Conv2d in BF16 under autocast, all of them in bf16."""
    assert max(run_ranks(error_of_the_mean, 3, preset, precision)) < 1e-6
