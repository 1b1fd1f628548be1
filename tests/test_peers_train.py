"""benchmarks.peers_train starts open_clip's trainer and ours with the same setting, and reads what each says of it."""

import json
import sys

import pytest

from benchmarks import peers_train
from benchmarks.paper import towers
from benchmarks.rows import read
from tests.checkout import ROOT

MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},  # its tokenizer's
}


def options_of(*flags: str):
    return peers_train._parser().parse_args(flags)


def test_both_programs_get_the_same_setting():
    settings = peers_train.settings(options_of("--accum-freq", "1,4", "--blocks", "eager,compiled"))
    assert len(settings) == 8 and {setting["global_batch"] for setting in settings} == {128, 512}
    theirs, ours = (peers_train.flags_of(setting, 6, "cuda", "F") for setting in settings[-2:])
    shared = "--dataset-type synthetic --train-num-samples 3072 --model ViT-L-14 --precision amp_bf16 --batch-size 128"
    shared += " --accum-freq 4 --workers 12 --epochs 1 --device cuda"
    for flags in (theirs, ours):
        assert " ".join(flags).startswith(shared)
    assert "--torchcompile" in theirs and ours[ours.index("--compile-blocks") + 1] == "on"
    several = peers_train.settings(options_of("--gpus", "2"))[0]
    assert {"--local-loss", "--gather-with-grad"} <= set(peers_train.flags_of(several, 6, "cuda", "F"))


@pytest.mark.parametrize("program", peers_train.PROGRAMS)
def test_torchrun_takes_no_flag_of_a_program_for_its_own(program):
    from torch.distributed.run import get_args_parser

    setting = {"program": program, "gpus": 2}
    _, *words = peers_train.command(setting, ["--logs", "F", "--name", "x"])
    assert words[:2] == ["-m", "torch.distributed.run"]
    parsed = get_args_parser().parse_args(words[2:])
    assert parsed.nproc_per_node == "2" and parsed.module == (program == "open_clip")
    assert parsed.training_script_args[-4:] == ["--logs", "F", "--name", "x"]
    assert not {"--", "torch.distributed.run"} & set(peers_train.command(setting | {"gpus": 1}, ["--logs", "F"]))


def test_the_flags_are_open_clips_own():
    from tests.open_clip_stub import import_open_clip

    import_open_clip()
    from open_clip_train.params import parse_args

    setting = peers_train.settings(options_of("--grad-checkpointing", "--blocks", "compiled", "--gpus", "2"))[0]
    parsed = parse_args(peers_train.flags_of(setting, 6, "cuda", "F"))
    assert parsed.torchcompile and parsed.grad_checkpointing and parsed.local_loss and parsed.logs == "none"


def test_a_row_is_of_the_steps_after_the_warm_up_and_one_without_them_says_so():
    said = {"samples_per_second": [1.0, 9.0, 11.0, 16.0], "waiting": [0.9, 0.1, 0.2, 0.3], "peak_gib": [2.0, 3.0]}
    row = peers_train.row_of(said, 1)
    assert (row["samples_per_second"], row["mean"], row["steps"]) == (11.0, 12.0, 3)
    assert (row["waiting"], row["peak_gib"], row["status"]) == (0.2, 3.0, "ok")
    assert peers_train.row_of(said, 3) == {"status": "only 4 steps are in its log"}


@pytest.mark.slow
def test_a_program_that_fails_is_a_row_with_its_cause():
    options = options_of("--programs", "infcl", "--device", "cpu", "--precision", "fp32", "--model", "no-such-model")
    said = peers_train.run(peers_train.settings(options)[0], options)
    assert said["status"].startswith("exit code 2") and "no-such-model" in said["status"]


@pytest.mark.slow
def test_both_trainers_run_on_a_cpu(tmp_path, monkeypatch):
    """torchvision is made importable under a torch without CUDA; pandas, which only tables of images need, is empty."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").touch()
    declare = (
        f"import sys; sys.path.append({str(ROOT)!r}); from tests.open_clip_stub import declare_torchvision_operators"
    )
    (tmp_path / "sitecustomize.py").write_text(f"{declare}\ndeclare_torchvision_operators()\n")
    (tmp_path / "mini.json").write_text(json.dumps(MODEL))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = f"--model {tmp_path}/mini.json --batch-size 4 --accum-freq 2 --blocks eager --precision fp32 --workers 0"
    flags += f" --steps 2 --warm-up 1 --device cpu --csv {tmp_path}/rows.csv"
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers_train", *flags.split()])
    peers_train.main()
    rows = read(tmp_path / "rows.csv")
    assert [(row["program"], row["status"], row["steps"]) for row in rows] == [
        ("open_clip", "ok", "2"),
        ("infcl", "ok", "2"),
    ]
    assert all(float(row["samples_per_second"]) > 0 for row in rows)
    assert rows[0]["waiting"] == "" and 0 <= float(rows[1]["waiting"]) <= 1  # with accumulation, theirs is not known


def test_the_table_of_both_trainers(monkeypatch):
    monkeypatch.setattr(towers, "rows", lambda name: [])
    assert towers.peer_trainers() == "Both trainers are not measured side by side yet."
    common = {"gpus": 1, "model": "ViT-L-14", "checkpointing": 0, "micro_batch": 128, "accum_freq": 1, "device": "h"}
    common |= {"torch": "t", "commit": "a", "blocks": "eager", "status": "ok", "samples_per_second": 700.0}
    common |= {"mean": 701.0, "std": 3.0, "steps": 10, "waiting": 0.02, "peak_gib": 40.0, "version": ""}
    found = [
        common | {"program": "infcl"},
        common | {"program": "open_clip", "version": "3.3.0", "status": "exit code 1"},
    ]
    monkeypatch.setattr(towers, "rows", lambda name: found)
    assert towers.peer_trainers().splitlines()[2:] == [
        "| 1 | ViT-L-14 | 128 x 1 | open_clip 3.3.0 | eager | exit code 1 |  |  |",
        "| 1 | ViT-L-14 | 128 x 1 | infcl | eager | 700 (701 +- 3, 10 steps) | 2% | 40.0 |",
        "",
        "h, torch t, commit a.",
    ]
