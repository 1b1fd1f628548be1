"""The average of the weights is seen where asked, moves between layouts, is evaluated and exported.

tests/engine/test_engine.py compares it with a float64 single-process one, tests/train/test_resume.py resumes it.
"""

import dataclasses
import json

import pytest
import torch

from infcl.checkpoint.load import complete_checkpoints, consolidated_state_dict
from infcl.checkpoint.run_folder import RunFolder
from infcl.convert.__main__ import main as convert
from infcl.convert.export import load_exported
from infcl.convert.import_weights import read_weights
from infcl.evaluate.load import load_model
from tests.lib.engine_steps import START, engine_on_cpu
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import ToyCLIP, global_batch
from tests.lib.training import demo_config, fit, run_losses


def seen_weights(rank, world_size, preset, precision):
    """What forwards see before, while and after the average is shown, and the FP32 master weights before and after."""
    from infcl.checkpoint.load import full_weights

    engine = engine_on_cpu(ToyCLIP(logit_scale=START), preset, precision=precision, ema_decay=0.9)
    for step in range(2):
        output = engine.encode(*global_batch(4, seed=step))
        engine.backward(sum(value.square().sum() for value in output.values()) + output["image_features"].sum(), True)
        engine.step(0.1)
        engine.state.update_average()
    engine.train(False)

    @torch.no_grad()
    def look():
        output = engine.encode(*global_batch(4))
        return output | engine.scalar_values({"logit_scale": output["logit_scale"]})

    masters = full_weights(engine, keep=True)
    before = look()
    with engine.showing_average():
        shown = look()
    average = ToyCLIP()
    average.load_state_dict(full_weights(engine, keep=True, ema=True))
    with torch.no_grad():
        reference = average(*global_batch(4))
    return before, shown, look(), reference, masters, full_weights(engine, keep=True)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("preset", "precision"), [("zero0", "fp32"), ("zero2_bf16", "bf16"), ("zero3", "fp32"), ("zero3_offload", "fp32")]
)
def test_forwards_see_the_average_where_asked_and_then_the_weights_again(preset, precision):
    before, shown, after, reference, masters, masters_after = run_ranks(seen_weights, 2, preset, precision)[0]
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for name in reference:
        assert torch.allclose(shown[name], reference[name], atol=tolerance), name
        assert not torch.equal(shown[name], before[name]), name
        assert torch.equal(after[name], before[name]), name
    assert all(torch.equal(masters[name], masters_after[name]) for name in masters)


@pytest.fixture(scope="module")
def averaged_run(demo_folder, tmp_path_factory):
    """A run of three steps with averaged weights, ZeRO-1 on two ranks: (config, run)."""
    logs = tmp_path_factory.mktemp("averaged")
    flags = {"ema_decay": 0.9, "batch_size": 16, "steps": 3, "save_every_n_steps": 1, "keep_checkpoints": 0}
    config = demo_config(demo_folder, logs, val_data=str(demo_folder / "val"), **flags)
    run_losses(2, config)
    return config, RunFolder(logs / "run")


def test_the_trainer_updates_the_average_once_per_step(averaged_run):
    _, run = averaged_run
    steps = [[consolidated_state_dict(path, ema=ema) for ema in (False, True)] for path in complete_checkpoints(run)]
    steps.reverse()
    for done, ((_, before), (weights, average)) in enumerate(zip(steps, steps[1:]), start=1):
        decay = min(0.9, (1 + done) / (10 + done))
        for name, value in before.items():
            torch.testing.assert_close(average[name], value.lerp(weights[name], 1 - decay), msg=f"{name}, step {done}")
    assert len(steps) == 3


def evaluation_command(rank, world_size, arguments):
    import infcl.evaluate.__main__ as module

    module.destroy_parallel = lambda *_: None  # the test's processes continue
    return module.main(arguments)


def test_the_average_is_evaluated_and_exported(averaged_run, tmp_path):
    config, run = averaged_run
    average, weights = (consolidated_state_dict(run.root, ema=ema) for ema in (True, False))
    assert not torch.equal(average["visual.proj"], weights["visual.proj"])
    exported, _ = load_exported(run.export)
    assert torch.equal(exported.state_dict()["visual.proj"], average["visual.proj"])
    for flags, wanted in (([], average), (["--no-ema"], weights)):
        out = tmp_path / f"out{len(flags)}"
        assert convert(["export", str(run.root), "--out", str(out), *flags]) == 0
        assert torch.equal(read_weights(out).state["visual.proj"], wanted["visual.proj"])
    evaluated, _, _ = load_model(run.root, device=torch.device("cpu"))
    assert torch.equal(evaluated.visual.proj, average["visual.proj"])
    given = ["--task", "retrieval", "--data", config.val_data, "--device", "cpu", "--out", str(tmp_path / "rows")]
    for checkpoint, flags in ((run.root, []), (run.root, ["--no-ema"]), (run.export, [])):
        assert run_ranks(evaluation_command, 1, [*given, "--checkpoint", str(checkpoint), *flags]) == [0]
    recorded = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row.get("ema") for row in recorded] == [True, False, None], "which weights of a run were evaluated"
    assert "moving average" in (tmp_path / "out0" / "README.md").read_text()


@pytest.mark.first(2)
@pytest.mark.parametrize(("world_size", "preset", "decay"), [(1, "zero0", 0.9), (1, "zero1", None), (2, "zero3", 0.9)])
def test_an_average_moves_to_another_layout_unchanged(averaged_run, tmp_path, world_size, preset, decay):
    """Resumed behind the last step, the run only evaluates and exports its average; without --ema-decay its weights."""
    config, run = averaged_run
    moved = dataclasses.replace(
        config,
        resume=str(complete_checkpoints(run)[0]),
        logs=str(tmp_path),
        batch_size=32 // world_size,
        deepspeed_config=f"ds_configs/{preset}.json",
        ema_decay=decay,
    )
    run_ranks(fit, world_size, moved)
    expected = consolidated_state_dict(run.root, ema=decay is not None)
    got = load_exported(tmp_path / "run" / "export")[0].state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    before, after = (
        json.loads((root / "summary.json").read_text())["evaluation"]["retrieval"]
        for root in (run.root, tmp_path / "run")
    )
    assert (after == pytest.approx(before, rel=1e-4)) == (decay is not None)


def test_an_average_starts_at_the_weights_of_a_run_without_one(demo_folder, tmp_path, capsys):
    plain = demo_config(demo_folder, tmp_path, steps=1)
    run_losses(1, plain)
    assert convert(["export", str(tmp_path / "run"), "--ema"]) == 2
    assert "without --ema-decay" in capsys.readouterr().err
    checkpoint = complete_checkpoints(RunFolder(tmp_path / "run"))[0]
    averaged = dataclasses.replace(plain, ema_decay=0.9, logs=str(tmp_path / "averaged"), resume=str(checkpoint))
    run_losses(1, averaged)
    runs = (tmp_path / "run", tmp_path / "averaged" / "run")
    weights, average = (load_exported(run / "export")[0].state_dict() for run in runs)
    assert all(torch.equal(average[name], weights[name]) for name in weights)
