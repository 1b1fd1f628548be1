"""pretrain_clip.py as a user starts it: through the deepspeed launcher, and alone; exit codes and what is printed."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from infcl.checkpoint.load import consolidated_state_dict, trainer_state
from infcl.checkpoint.run_folder import FolderTaken, NotWritten
from infcl.convert.export import load_exported
from infcl.data.loader import TooManyBadSamples
from infcl.data.workers import NoBatch
from infcl.report import read_metrics
from infcl.train.ending import run
from infcl.train.finite import Diverged
from infcl.train.saves import Stopped
from tests.lib.checkout import ROOT
from tests.lib.entry import ON_CPU, alone, command, forked, golden, launch, losses
from tests.lib.waiting import finish, wait_for_checkpoint


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        (FolderTaken("process 7 trains here"), 2, "pretrain_clip.py: error: process 7 trains here\n"),
        (Diverged("21 steps in a row"), 65, "pretrain_clip.py: error: 21 steps in a row\n"),
        (TooManyBadSamples("rank 1: 9 bad"), 65, "pretrain_clip.py: error: rank 1: 9 bad\n"),
        (NoBatch("10,000 samples", 65), 65, "pretrain_clip.py: error: rank 0: 10,000 samples\n"),
        (NoBatch("a worker hangs"), 1, "pretrain_clip.py: error: rank 0: a worker hangs\n"),
        (NotWritten("no space"), 74, "pretrain_clip.py: error: no space\n"),
        (Stopped(signal.SIGUSR1), 138, "SIGUSR1 received at step 3; --resume latest\n"),
        (KeyboardInterrupt(), 130, "interrupted at step 3; --resume latest\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_end_of_a_run_has_its_code_and_one_line(end, code, printed, capsys, monkeypatch):
    """What starts a run again knows its end by the code."""
    monkeypatch.setattr("infcl.train.ending.destroy_parallel", lambda parallel: None)
    checkpoints, fit = SimpleNamespace(hint="--resume latest"), mock.Mock(side_effect=end)
    trainer = SimpleNamespace(parallel=SimpleNamespace(hosts=1), fit=fit, step=3, checkpoints=checkpoints)
    assert run("pretrain_clip.py", lambda: trainer) == code
    shown = capsys.readouterr()
    assert shown.out + shown.err == printed


@pytest.mark.long
def test_storage_that_fails_at_the_end_ends_the_run_with_one_line_and_a_code_of_its_own(demo_folder, tmp_path):
    (tmp_path / "run" / "export" / "open_clip_model.safetensors").mkdir(parents=True)
    arguments = command(demo_folder, tmp_path, "--steps", "1", "--workers", "0", "--device", "cpu")
    ended = forked(arguments, 2)
    assert ended.returncode == 74 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("pretrain_clip.py: error: the trained model could not be written to") == 1
    assert "start again with --resume latest" in ended.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize("start", [forked, launch])
def test_what_a_finished_run_leaves_and_a_second_start_does_not_train_again(demo_folder, tmp_path, start):
    arguments = command(
        demo_folder, tmp_path, "--deepspeed_config", "ds_configs/zero3.json", "--grad-checkpointing",
        "--val-data", f"{demo_folder}/val", "--zeroshot-data", f"{demo_folder}/zeroshot", "--device", "cpu",
        *(("--workers", "0") if start is forked else ()),
    )  # fmt: skip
    first = start(arguments, 2)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "FutureWarning" not in first.stderr
    for shown in ("zero-shot top-1", "image->text recall@1", "peak memory", "loss curve", "exported model"):
        assert shown in first.stdout
    root = tmp_path / "run"
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["zero_stage"], summary["world_size"], summary["samples_seen"]) == (3, 2, 3 * 64)
    assert {"zero_shot_top1", "image_to_text_r1", "text_to_image_r1"} <= summary.keys()
    assert all(Path(path).exists() for path in summary["paths"].values())
    names = {path.name for path in root.iterdir()}
    assert {"config.json", "model_config.json", "metrics.jsonl", "tensorboard"} <= names and "running.json" not in names
    assert (root / "loss_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (root / "tokenizer.model").read_bytes() == (demo_folder / "tokenizer.model").read_bytes()
    environment = json.loads((root / "environment.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"].split("+")[0])
    assert environment["world_size"] == 2 and f"\n# {root.name}\n" in (root / "export" / "README.md").read_text()
    trained, exported = consolidated_state_dict(root), load_exported(root / "export")[0].state_dict()
    assert set(trained) == set(exported)
    assert all(torch.equal(trained[name].reshape(-1), exported[name].reshape(-1)) for name in trained)
    before = (root / "metrics.jsonl").read_text()
    second = forked([*arguments, "--resume", "latest", "--workers", "0"], 2)
    assert second.returncode == 0 and "is finished" in second.stdout and "zero-shot top-1" in second.stdout
    assert (root / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("flags", "message", "ranks"),
    [
        (["--batch-size", "4096", "--device", "cpu"], "1536 usable samples, fewer than one global batch of 16384", 2),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag", 1),
        (["--dry-run", "--batch-size", "4096"], "fewer than one global batch of 8192", 1),
        (["--dry-run", "--resume", "latst"], "--resume latst: no such folder; give latest, or ", 1),
    ],
)
def test_a_usage_error_is_one_line_from_one_rank_with_exit_code_2(demo_folder, tmp_path, flags, message, ranks):
    arguments = command(demo_folder, tmp_path, *flags)
    result = forked(arguments, ranks)
    printed = result.stdout + result.stderr
    assert result.returncode == 2 and message in " ".join(result.stderr.split()) and "Traceback" not in printed, printed
    assert printed.count("pretrain_clip.py: error:") == 1 and not (tmp_path / "run").exists()


def test_dry_run_prints_the_plan_and_leaves_nothing(demo_folder, tmp_path):
    flags = ["--dry-run", "--val-data", f"{demo_folder}/val", "--deepspeed_config", "ds_configs/zero2.json"]
    result = forked(command(demo_folder, tmp_path / "logs", *flags), 1)
    assert result.returncode == 0, result.stdout + result.stderr
    for shown in (
        "32 samples per step = 1 data-parallel rank x 2 micro-batches",
        "for 1 rank of ",
        "3 = 0.0625 epochs of 48",
        "8 shards hold 1536 usable samples; left out by the index: none",
        "peak 0.001 after 5 warm-up steps (167% of the run)",
        "the warm-up takes",
        "image tower 0.28M",
        "ZeRO-0 (stage 2 over one rank)",
        "ZeRO-0*     ZeRO-3 ",
        "retrieval every epoch and at the end",
    ):
        assert shown in result.stdout
    buckets = next(line for line in result.stdout.splitlines() if "gradient buckets" in line)
    assert "MiB" in buckets and "GiB" not in buckets  # on a CPU a small model leaves most of a bucket untouched
    assert not (tmp_path / "logs").exists()


@pytest.mark.long
def test_too_many_bad_samples_end_all_ranks_with_a_checkpoint_and_one_message(demo_folder, tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for source in sorted(Path(demo_folder, "train").glob("*.tar")):
        with tarfile.open(source) as whole, tarfile.open(folder / source.name, "w") as cut:
            for number, member in enumerate(whole):
                content = whole.extractfile(member).read()
                is_bad = number % 5 == 0 and not member.name.endswith((".txt", ".json"))
                member.size = len(content[:40] if is_bad else content)
                cut.addfile(member, io.BytesIO(content[: member.size]))
    arguments = command(tmp_path, tmp_path, "--steps", "20", "--save-frequency", "0", "--workers", "0")
    arguments[arguments.index("--tokenizer") + 1] = f"{demo_folder}/tokenizer.model"
    result = forked(arguments, 2)
    assert result.returncode == 65 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("samples of this rank were bad") == 1, result.stderr
    saved = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert saved != "step_00000020" and f"continues from {saved}" in result.stderr, result.stderr
    resumed = forked([*arguments, "--resume", "latest", "--max-bad-fraction", "0.9"], 2)
    assert resumed.returncode == 0 and f"at step {int(saved[5:])}" in resumed.stdout, resumed.stdout + resumed.stderr


@pytest.mark.long
def test_ctrl_c_saves_and_ends_the_run_with_130_and_a_hint(demo_folder, tmp_path):
    """To the whole process group, with the loader's workers, as a terminal sends it."""
    arguments = command(demo_folder, tmp_path, "--steps", "100000", "--save-every-n-steps", "2")
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | ON_CPU, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background inherits "ignored"
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_checkpoint(tmp_path, process)
        os.killpg(process.pid, signal.SIGINT)
        code, output = finish(process, 300)
    finally:
        process.kill()
    assert code == 130, output
    step = output.split("SIGINT received at step ")[1].split(";")[0]
    assert f"--resume latest continues from step_{int(step):08d}" in output


@pytest.mark.gpu
def test_on_a_gpu_the_triton_tile_follows_the_golden_curve(demo_folder, tmp_path):
    flags = ["--precision", "fp32", "--tile", "triton", "--batch-size", "32", "--steps", "20", "--device", "cuda"]
    result = alone(command(demo_folder, tmp_path, *flags), environment={})
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(tmp_path) == pytest.approx(golden(), rel=5e-3)


@pytest.mark.multigpu
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3", "zero3_offload", "zero2_bf16", "zero2_fp16"])
def test_on_two_gpus_every_preset_trains_over_nccl(demo_folder, tmp_path, preset):
    flags = ["--deepspeed_config", f"ds_configs/{preset}.json", "--steps", "20", "--grad-checkpointing"]
    result = launch(command(demo_folder, tmp_path, *flags), 2, environment={})
    assert result.returncode == 0, result.stdout + result.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert records[0]["loss"] == pytest.approx(golden()[0], rel=2e-2)
    if records[-1]["skipped_steps"] == 0:
        assert records[-1]["loss"] == pytest.approx(golden()[-1], rel=5e-2)


@pytest.mark.multigpu
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_on_two_gpus_graphs_that_stay_change_nothing_and_a_resumed_run_keeps_as_many(demo_folder, tmp_path, preset):
    flags = ["--deepspeed_config", f"ds_configs/{preset}.json", "--steps", "20", "--batch-size", "8"]
    flags += ["--accum-freq", "4", "--resident-micro-batches", "auto", "--keep-checkpoints", "0"]
    whole = launch(command(demo_folder, tmp_path, *flags, "--save-every-n-steps", "10"), 2, environment={})
    assert whole.returncode == 0 and "cached activations of 4 micro-batches" in whole.stdout, (
        whole.stdout + whole.stderr
    )
    assert losses(tmp_path) == pytest.approx(golden(), rel=5e-2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000010"
    assert trainer_state(checkpoint)["graphs"] == {"kept": 4, "measured": True, "of": [2, 4, 8]}
    more = command(demo_folder, tmp_path, *flags, "--name", "resumed", "--resume", str(checkpoint))
    resumed = launch(more, 2, environment={})
    assert resumed.returncode == 0 and "cached activations of 4 micro-batches" in resumed.stdout, (
        resumed.stdout + resumed.stderr
    )
    assert losses(tmp_path, "resumed") == pytest.approx(losses(tmp_path)[10:], rel=1e-3)
