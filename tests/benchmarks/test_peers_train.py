"""benchmarks.peers_train starts trainers of others and ours with the same setting, and reads what each says of it.

Inf-CLIP (d9f2833) starts on GPUs alone: what it is started with is held here by a stand-in that asks for it as it does.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peers_train
from benchmarks.rows import read
from tests.lib.checkout import ROOT

MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},  # its tokenizer's
}


KNOWN_MODELS = SimpleNamespace(list_models=lambda: ["ViT-B-16"])


def options_of(*flags: str):
    return peers_train._parser().parse_args(flags)


@pytest.fixture
def checkout(tmp_path):
    """Flags that name a checkout of Inf-CLIP: a repository without code."""
    folder = tmp_path / "inf_clip"
    (folder / "inf_clip").mkdir(parents=True)
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    return ["--inf-clip", str(folder)]


def test_all_programs_get_the_same_setting(checkout):
    settings = peers_train.settings(options_of("--accum-freq", "4", "--blocks", "compiled"))
    settings += peers_train.settings(options_of("--grad-checkpointing", "--accum-freq", "1", *checkout))[:3]
    shared = "--train-num-samples {} --model ViT-L-14 --precision amp_bf16 --batch-size 128 --workers 12 --epochs 1 "
    for setting in settings:
        flags = " ".join(peers_train.flags_of(setting, 6, "cuda", "F"))
        assert flags.startswith(f"{shared.format(6 * setting['global_batch'])}--name {setting['program']}")
        assert ("--grad-checkpointing" in flags) == bool(setting["checkpointing"])
        assert "--dataset-type synthetic" in flags
    theirs, ours = (peers_train.flags_of(setting, 6, "cuda", "F") for setting in settings[:2])
    for flags in (theirs, ours):
        assert "--accum-freq 4 --device cuda" in " ".join(flags)
    assert "--torchcompile" in theirs and ours[ours.index("--compile-blocks") + 1] == "on"
    for setting in peers_train.settings(options_of("--gpus", "2", "--programs", "open_clip")):
        assert {"--local-loss", "--gather-with-grad"} <= set(peers_train.flags_of(setting, 6, "cuda", "F"))


def test_steps_are_timed_after_the_optimizer(monkeypatch):
    clock = iter([0.0, 8.0, 10.0, 12.5, 15.0])
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    main = SimpleNamespace(main=lambda flags: [optimizer.step() for _ in range(4)])
    monkeypatch.setattr(peers_train, "import_module", lambda name: main if name.endswith("main") else KNOWN_MODELS)
    monkeypatch.setattr(peers_train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = peers_train.train("open_clip", ["--batch-size", "4", "--accum-freq", "5", "--model", "ViT-B-16"])
    assert said["samples_per_second"] == [5.0, 20.0, 16.0, 16.0]  # 40 samples per step
    optimizer.step()  # no longer timed


@pytest.mark.slow
def test_both_trainers_run_on_a_cpu(tmp_path, monkeypatch):
    """torchvision is made importable under a torch without CUDA; pandas, which only tables of images need, is empty."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").touch()
    declare = f"import sys; sys.path.append({str(ROOT)!r})\n"
    declare += "from tests.lib.open_clip_stub import declare_torchvision_operators"
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
        ("open_clip", "ok", 2),
        ("infcl", "ok", 2),
    ]
    assert all(float(row["samples_per_second"]) > 0 for row in rows)
    assert rows[0]["waiting"] == "" and 0 <= float(rows[1]["waiting"]) <= 1  # with accumulation, theirs is not known
