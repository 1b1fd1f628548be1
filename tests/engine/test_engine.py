"""Steps through DeepSpeed equal those of one float64 process: one table of models, stages, ranks and precisions."""

import contextlib
import json
import math
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from infcl.engine.patches import square_of
from tests.lib.engine_steps import (
    SPLIT,
    START,
    TOWERS,
    TOY,
    TOY_WITH_DROPOUT,
    engine_on_cpu,
    engine_steps,
    one_process,
)
from tests.lib.fp16 import fp16_allowed, fp16_preset
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import LR, ToyCLIP, global_batch, update_error, worst_error, worst_update_error

SUBJECTS = {"toy": TOY, "dropout": TOY_WITH_DROPOUT, "towers": TOWERS, "split": SPLIT}


class Case(NamedTuple):
    """How steps are made. Their oracle knows the model, the data-parallel ranks and the learning rates only."""

    subject: str
    preset: str
    precision: str = "fp32"
    ranks: int = 2
    resident: int = 1  # micro-batches that keep their graphs
    hosts: int = 1
    dropped: bool = False  # a graph is made and dropped before, as --resident-micro-batches auto measures one
    flags: dict[str, Any] = {}


class Bounds(NamedTuple):
    """Largest relative errors: of losses and norms, of a parameter, of a parameter's update, of all updates together.

    In half precision twice the largest that was seen. Logits of +-90 carry the 2^-9 of bf16 activations into the loss.
    Under tensor parallelism activations are rounded in parts and in sums of parts.
    """

    loss: float
    norm: float
    parameter: float
    update: float = 1e-3
    whole: float = 1e-3
    first_norm: float = 1.0
    average: tuple[float, float] = (1e-5, 1e-3)  # of a parameter's average and its update, without dropout


EXACT = Bounds(1e-5, 1e-5, 1e-5)
BOUNDS = {
    ("toy", "bf16"): Bounds(2e-2, 2e-2, 5e-2, 0.12, 0.12, average=(2e-2, 5e-2)),
    ("toy", "fp16"): Bounds(5e-3, 5e-3, 5e-3, 6e-3, 6e-3, average=(5e-3, 6e-3)),
    ("towers", "bf16"): Bounds(2e-2, 2e-2, math.inf, 0.24, 0.08),
    ("towers", "fp16"): Bounds(2e-2, 2e-2, math.inf, 0.032, 0.01),
    ("split", "bf16"): Bounds(2e-2, 0.15, 5e-2, 0.11, 0.11, first_norm=2e-2),
    ("split", "amp_bf16"): Bounds(2e-2, 0.15, 5e-2, 0.11, 0.11, first_norm=5e-2),
    ("split", "fp16"): Bounds(2e-3, 2e-2, 2e-2, 1.6e-2, 1.6e-2),
}
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
IN_BF16 = [("zero1", "bf16"), ("zero2_bf16", "bf16"), ("zero3", "bf16"), ("zero3_offload", "bf16")]
IN_BF16 += [(f"zero{stage}", "amp_bf16") for stage in range(4)]
CHECKPOINTED, COMPILED, PACKED = {"grad_checkpointing": True}, {"compile_blocks": "on"}, {"pack_captions": "on"}
RATES = {"image_lr": 0.3 * LR, "text_lr": 2 * LR, "text_layer_decay": 0.5}
T2, T4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}

TABLE = [Case("toy", preset) for preset in PRESETS]
TABLE += [Case("dropout", preset, ranks=3, resident=2) for preset in ("zero1", "zero3")]
TABLE += [Case("toy", "zero2", hosts=2), Case("toy", "zero3", resident=2, dropped=True)]
TABLE += [Case("dropout", *case, resident=2) for case in IN_BF16[:2]]
TABLE += [
    Case("toy", "zero1", "bf16"),
    Case("dropout", "zero1", "fp16"),
    Case("toy", "offloaded2"),
    Case("toy", "offloaded1", "bf16"),
]
TABLE += [Case("towers", "zero0", flags=CHECKPOINTED), Case("towers", "zero0", "amp_bf16", flags=CHECKPOINTED)]
TABLE += [Case("towers", "zero1", flags=RATES)]
TABLE += [Case("split", "zero3", flags=T2), Case("split", "zero1", ranks=4, flags=T2 | PACKED)]
TABLE += [Case("split", "zero1", "bf16", ranks=4, flags=T2)]
FIRST = len(TABLE)
TABLE += [Case("toy", preset, ranks=1) for preset in PRESETS]
TABLE += [Case("dropout", preset, ranks=3, resident=2) for preset in ("zero0", "zero2", "zero3_offload")]
TABLE += [Case("dropout", preset, ranks=4, resident=3) for preset in ("zero1", "zero3")]
TABLE += [Case("toy", "zero1", hosts=2), Case("toy", "zero1", resident=2, dropped=True)]
TABLE += [Case("toy", *case, ranks=1) for case in IN_BF16[:4]] + [Case("toy", *case) for case in IN_BF16[1:3]]
TABLE += [Case("dropout", *case, resident=2) for case in IN_BF16[2:]]
TABLE += [Case("toy", preset, "bf16", ranks=4) for preset in ("zero1", "zero2_bf16", "zero3_offload")]
TABLE += [Case("toy", "zero1", "fp16", 1, 2), Case("toy", "zero2", "fp16", 3), Case("toy", "zero3", "fp16", 2, 2)]
TABLE += [Case("dropout", "zero3_offload", "fp16", 4)]
TABLE += [Case("towers", preset, resident=2, flags=CHECKPOINTED) for preset in ("zero1", "zero3")]
TABLE += [Case("towers", "zero1", "bf16", resident=2, flags=CHECKPOINTED), Case("towers", "zero3", flags=RATES)]
TABLE += [Case("towers", "zero3_offload", "bf16", 4, flags=CHECKPOINTED)]
TABLE += [Case("towers", "zero3_offload", "fp16", resident=2, flags=CHECKPOINTED)]
TABLE += [Case("split", f"zero{stage}", ranks=4, flags=T2) for stage in range(4)]
TABLE += [Case("split", "zero0", ranks=4, flags=T4), Case("split", "zero3", ranks=4, flags=T4 | PACKED)]
TABLE += [Case("split", "zero3", "bf16", 4, flags=T2), Case("split", "zero1", "amp_bf16", 4, flags=T2)]
TABLE += [Case("split", "zero1", "fp16", 4, flags=T2), Case("split", "zero3", "fp16", 4, flags=T2)]
SLOW = [Case("towers", preset, resident=2, flags=CHECKPOINTED | COMPILED) for preset in ("zero1", "zero3")]
SLOW += [Case("towers", "zero2", flags=COMPILED), Case("towers", "zero2", "amp_bf16", flags=CHECKPOINTED | COMPILED)]
SLOW += [Case("towers", *case, resident=2, flags=CHECKPOINTED | COMPILED) for case in (IN_BF16[0], IN_BF16[2])]
SLOW += [Case("towers", "zero1", "fp16", flags=CHECKPOINTED | COMPILED)]
SLOW += [Case("split", "zero3", flags=T2 | COMPILED), Case("split", "zero1", ranks=4, flags=T2 | COMPILED | PACKED)]
SLOW += [Case("split", "zero0", ranks=4, flags=T2 | COMPILED | CHECKPOINTED)]


def preset_of(name: str, precision: str, folder) -> str:
    """Return the name of a preset, or a file: in FP16, or "offloaded<stage>"."""
    if precision == "fp16":
        return fp16_preset(folder, name)
    if not name.startswith("offloaded"):
        return name
    zero = {"stage": int(name[-1]), "offload_optimizer": {"device": "cpu"}}
    (folder / "preset.json").write_text(json.dumps({"zero_optimization": zero}))
    return str(folder / "preset.json")


def make_steps(rank, world_size, case: Case, preset: str):
    from infcl.parallel import Parallel

    with contextlib.ExitStack() as stack:
        if case.precision == "fp16":
            stack.enter_context(fp16_allowed())
        if case.subject == "split":
            stack.enter_context(mock.patch("infcl.train.compile.ALIGNED", 1))  # its sizes are no multiples of 8
        stack.enter_context(mock.patch.object(Parallel, "hosts", case.hosts))
        options = {"resident": case.resident, "dropped": case.dropped, "precision": case.precision}
        return engine_steps(rank, world_size, SUBJECTS[case.subject], preset, **options, **case.flags)


def rate_of(name: str) -> float:
    """Of RATES, in words: the image tower's own, a half of the text's for each block down, scalars --lr."""
    if name.startswith("logit_scale"):
        return 1.0
    if name.startswith("visual."):
        return 0.3
    if name.startswith(("text_projection", "ln_final")):
        return 2.0
    return 1.0 if name.startswith("transformer.resblocks.0.") else 0.5


@pytest.mark.first(FIRST)
@pytest.mark.parametrize(
    "case",
    [*TABLE, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_steps_equal_those_of_one_float64_process(case, tmp_path):
    """Three steps, of the towers one, with patch dropout."""
    subject, size = SUBJECTS[case.subject], case.flags.get("tensor_parallel_size", 1)
    preset = preset_of(case.preset, case.precision, tmp_path)
    results = run_ranks(make_steps, case.ranks, case, preset, timeout=480 if "compile_blocks" in case.flags else 250)
    expected = one_process(subject, case.ranks // size, rate=rate_of if case.flags is RATES else None)
    kind = "toy" if case.subject == "dropout" else case.subject
    precision = case.precision.removeprefix("amp_")
    bounds = BOUNDS.get((kind, case.precision)) or BOUNDS.get((kind, precision), EXACT)
    for got in results if size > 1 else results[:1]:
        assert got.losses == pytest.approx(expected.losses, rel=bounds.loss)
        for found, true in zip(got.norms, expected.norms, strict=True):
            assert found == pytest.approx(true, rel=bounds.norm)
        assert got.norms[0] == pytest.approx(expected.norms[0], rel=bounds.first_norm)
        assert worst_error(got.state, expected.state) < bounds.parameter
        assert worst_update_error(got.state, expected.state, subject.start()) < bounds.update
        assert update_error(got.state, expected.state, subject.start()) < bounds.whole
        assert got.counters["global_steps"] == got.counters["optimizer_step"] == len(expected.losses)
        assert case.hosts == 1 or got.overlaps, "across hosts it reduces in the backward"
        if kind == "toy":
            assert got.scales[0] == pytest.approx(START, abs=1e-6), "FP32 master weights start from unrounded values"
            closer = case.subject == "toy" and case.ranks > 1
            least, least_update = bounds.average if closer else (bounds.parameter, bounds.update)
            assert worst_error(got.average, expected.average) < least
            assert worst_update_error(got.average, expected.average, subject.start()) < least_update
            assert any((value != value.bfloat16().float()).any() for value in got.average.values())
            assert all(not torch.equal(got.average[name], got.state[name]) for name in got.state)


def misaligned_parameters(rank, world_size, preset):
    from infcl.models.clip import CLIP
    from infcl.models.config import load_model_config

    model = CLIP(load_model_config("demo").with_logit_bias(-10.0))
    engine_on_cpu(model, preset, precision="bf16")
    stored = {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in model.named_parameters()}
    return [name for name, tensor in stored.items() if tensor.data_ptr() % 16 and not name.startswith("logit_")]


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_parameters_begin_at_multiples_of_16_bytes(preset):
    """Compiled kernels rely on it: with logit_scale before them in ZeRO's flat buffer they fail on a GPU."""
    assert run_ranks(misaligned_parameters, 1, preset)[0] == []


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("preset", "precision"),
    [*((f"zero{stage}", "fp32") for stage in range(4)), ("offloaded1", "bf16"), ("zero2_bf16", "bf16")]
    + [("zero3_offload", "fp32"), ("zero1", "bf16"), ("offloaded2", "bf16"), ("offloaded3", "bf16")],
)
def test_a_step_that_is_not_finite_changes_nothing(preset, precision, tmp_path):
    """The steps around it give what they give without it: no gradient of it stays behind, Adam does not count it."""
    preset = preset_of(preset, precision, tmp_path)
    first, second = run_ranks(engine_steps, 2, TOY, preset, precision=precision, poisoned=1)
    assert first.applied == [True, False, True]
    assert second.bad_rows == [TOY.size + 2], "the row that did it is known to its rank"
    counted = {"optimizer_step": 2, "global_steps": 3, "skipped_steps": 1}
    assert {name: first.counters[name] for name in counted} == counted
    expected = one_process(TOY._replace(numbers=(0, 2)), 2).state
    assert worst_error(first.state, expected) < (5e-2 if precision == "bf16" else 1e-5)
    if precision == "bf16":
        assert worst_update_error(first.state, expected, TOY.start()) < BOUNDS["toy", "bf16"].update


def accumulate_ones(rank, world_size, preset):
    """600 micro-batches, each with gradient 1 for logit_scale: what the engine accumulated."""
    options = {"precision": "bf16", "grad_clip_norm": None, "wd": 0.0}
    engine = engine_on_cpu(ToyCLIP(logit_scale=0.0), preset, 600, 1, **options)
    images, texts = global_batch(1)
    for index in range(600):
        output = engine.encode(images, texts)
        zero = 0 * (output["image_features"].sum() + output["text_features"].sum())
        engine.backward(output["logit_scale"].sum() + zero, index == 599)
    engine.step(LR)
    return float(engine.norms[2])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("preset", "world_size"),
    [("zero1", 1), ("zero2_bf16", 2), ("zero3", 1), pytest.param("zero3_offload", 2, marks=pytest.mark.slow)],
)
def test_six_hundred_bf16_micro_batches_accumulate_without_loss(preset, world_size):
    """In bf16, DeepSpeed's default, they sum to 256."""
    assert run_ranks(accumulate_ones, world_size, preset)[0] == pytest.approx(600.0, rel=1e-6)


def test_the_square_of_many_numbers_is_exact_on_a_cpu():
    """In float32 a CPU's sum of 25 million squares is 0.3% off."""
    numbers = torch.randn(25_000_000, generator=torch.Generator().manual_seed(0))
    found = square_of([None, numbers, numbers[:0]], torch.device("cpu"))
    assert float(found) == pytest.approx(float(numbers.double().square().sum()), rel=1e-6)
