"""pretrain_clip.py as a user starts it: through the deepspeed launcher, and alone; exit codes and what is printed."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from infcl.checkpoint.load import trainer_state
from infcl.report import read_metrics
from tests.lib.checkout import ROOT
from tests.lib.entry import ON_CPU, alone, command, forked, golden, launch, losses
from tests.lib.shard_files import write_tar
from tests.lib.waiting import finish, wait_for_checkpoint


def test_steps_that_stay_not_finite_end_with_a_code_of_their_own(demo_folder, tmp_path):
    """What starts a run again knows it by that; it writes one line, no traceback."""
    arguments = command(demo_folder, tmp_path, "--lr", "1e30", "--warmup", "0", "--steps", "24", "--workers", "0")
    ended = forked([*arguments, "--device", "cpu"], 2)
    assert ended.returncode == 65 and "Traceback" not in ended.stderr
    assert ended.stderr.count("pretrain_clip.py: error: 21 steps in a row had gradients that are not finite") == 1


def test_data_without_images_ends_a_rank_with_one_line_and_the_code_of_bad_data(demo_folder, tmp_path):
    write_tar(tmp_path / "shards" / "0.tar", [(f"{i}.{e}", b"text") for i in range(64) for e in ("png", "txt")])
    arguments = command(demo_folder, tmp_path, "--steps", "1", "--workers", "0", "--train-data", f"{tmp_path}/shards")
    ended = forked([*arguments, "--device", "cpu"], 1)
    assert ended.returncode == 65 and "Traceback" not in ended.stderr
    message = "pretrain_clip.py: error: rank 0: 10,000 samples in a row could not be used (the last: not_"
    assert ended.stderr.count(message) == 1


def test_storage_that_fails_at_the_end_ends_the_run_with_one_line_and_a_code_of_its_own(demo_folder, tmp_path):
    (tmp_path / "run" / "export" / "open_clip_model.safetensors").mkdir(parents=True)
    arguments = command(demo_folder, tmp_path, "--steps", "1", "--workers", "0", "--device", "cpu")
    ended = forked(arguments, 2)
    assert ended.returncode == 74 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("pretrain_clip.py: error: the trained model could not be written to") == 1
    assert "start again with --resume latest" in ended.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize("start", [forked, launch])
def test_a_run_trains_and_evaluates_and_a_second_start_does_not_train_again(demo_folder, tmp_path, start):
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
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["zero_stage"], summary["world_size"], summary["samples_seen"]) == (3, 2, 3 * 64)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    second = start([*arguments, "--resume", "latest"], 2)
    assert second.returncode == 0 and "is finished" in second.stdout and "zero-shot top-1" in second.stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("flags", "message", "ranks"),
    [
        (["--batch-size", "4096", "--device", "cpu"], "1536 usable samples, fewer than one global batch of 16384", 2),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag", 1),
        (["--device", "cuda"], "--device cuda: no GPU is visible", None),  # GPUs cannot be hidden from a fork
        (["--force-image-size", "30"], "image_size 30 is not a multiple of patch_size 8", 1),
    ],
)
def test_a_usage_error_is_one_line_from_one_rank_with_exit_code_2(demo_folder, tmp_path, flags, message, ranks):
    arguments = command(demo_folder, tmp_path, *flags)
    result = alone(arguments) if ranks is None else forked(arguments, ranks)
    printed = result.stdout + result.stderr
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in printed, printed
    assert printed.count("pretrain_clip.py: error:") == 1 and not (tmp_path / "run").exists()


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
