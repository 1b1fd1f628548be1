"""benchmarks.accuracy asks the trainer for what it compares; a training that fails leaves no row."""

import json
from pathlib import Path

from benchmarks import accuracy
from benchmarks.accuracy import _parser, loss_trainings
from benchmarks.rows import read
from infcl.config import make_parser


def test_trainings_of_one_seed_differ_in_the_loss_alone_and_one_in_its_products():
    options = _parser().parse_args("--out out --work work --seeds 2 --ranks 2".split())
    trainings = loss_trainings(options, Path("data"))
    assert len(trainings) == 12 and len({training.name for training in trainings}) == 12
    flags = [vars(make_parser().parse_args(training.flags)) for training in trainings if training.key["seed"] == 1]
    compared = [(flag["loss"], flag["tile_dtype"]) for flag in flags]
    as_the_dense_losses_multiply = {(loss, "fp32") for loss in ("clip", "open_clip", "disco", "inf_cl", "siglip")}
    assert set(compared) == as_the_dense_losses_multiply | {("inf_cl", "bf16")}
    same = {"loss": "", "tile_dtype": ""}
    assert all(flag | same == flags[0] | same for flag in flags)
    assert flags[0]["batch_size"] * flags[0]["accum_freq"] * 2 == 256 and flags[0]["seed"] == 1


def write_result(run: Path) -> None:
    run.mkdir(parents=True)
    rates = ("image_to_text_r1", "text_to_image_r1", "image_to_text_r5", "text_to_image_r5", "val_loss")
    evaluation = {"zero_shot": {"top1": 0.5}, "retrieval": dict.fromkeys(rates, 0.25)}
    summary = {"evaluation": evaluation, "train_seconds": 3.0, "steps": 40, "samples_seen": 320, "skipped_steps": 0}
    (run / "summary.json").write_text(json.dumps(summary))
    steps = [{"kind": "train", "step": i + 1, "samples_seen": 8 * i, "loss": float(i)} for i in range(40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_a_training_that_fails_is_named_and_the_next_command_trains_it_again(tmp_path, monkeypatch, capsys):
    failing = ["clip-0"]

    def run(command, seconds, env):
        name = command[command.index("--name") + 1]
        if name in failing:
            return "exit code 1", "ValueError: seven"
        write_result(tmp_path / "runs" / name)
        return "", ""

    monkeypatch.setattr(accuracy, "run", run)
    monkeypatch.setattr(accuracy, "prepare_demo", lambda *_, **__: tmp_path / "data")
    command = ["--losses", "clip", "inf_cl", "--seeds", "1", "--out", str(tmp_path)]
    assert accuracy.main([*command, "--work", str(tmp_path)]) == 1
    assert "clip-0: exit code 1\n  ValueError: seven" in capsys.readouterr().out
    assert [row["run"] for row in read(tmp_path / "accuracy_losses.csv")] == ["inf_cl-0"]
    failing.clear()
    assert accuracy.main([*command, "--work", str(tmp_path)]) == 0
    assert [row["run"] for row in read(tmp_path / "accuracy_losses.csv")] == ["inf_cl-0", "clip-0"]
    assert not (tmp_path / "runs" / "clip-0").exists()
