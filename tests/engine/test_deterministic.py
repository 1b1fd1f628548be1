"""--deterministic: what a GPU computes twice is the same twice, a resumed run the uninterrupted one bit for bit."""

import subprocess
import sys

import pytest
import torch

from infcl.checkpoint.load import consolidated_state_dict
from infcl.report import read_metrics
from tests.lib.checkout import ROOT
from tests.lib.entry import alone, command, launch

STEPS, SAVED = 12, 7
DEVICE = "cuda"
CASES = [(preset, "adamw") for preset in ("zero0", "zero1", "zero2", "zero3", "zero2_bf16", "zero3_offload")]
CASES += [("zero2", "lion"), ("zero3", "lamb"), ("zero1", "adafactor"), ("zero3_offload", "adafactor")]
CASES += [("zero2", "adamw8bit")]


def run(demo_folder, logs, name: str, ranks: int, flags: list[str]):
    """(losses, gradient norms, averaged weights) of a run on `ranks` GPUs."""
    fixed = ["--name", name, "--steps", str(STEPS), "--save-every-n-steps", str(SAVED), "--keep-checkpoints", "0"]
    fixed += ["--deterministic", "--device", DEVICE, "--force-patch-dropout", "0.25", "--ema-decay", "0.9"]
    arguments = command(demo_folder, logs, *fixed, *flags)
    result = launch(arguments, ranks, environment={}) if ranks > 1 else alone(arguments, environment={})
    assert result.returncode == 0, result.stdout + result.stderr
    records = read_metrics(logs / name / "metrics.jsonl", "train")
    curves = {record["step"]: (record["loss"], record["grad_norm"]) for record in records}
    return curves, consolidated_state_dict(logs / name, ema=True)


def check_bitwise(demo_folder, tmp_path, preset: str, opt: str, ranks: int) -> None:
    if opt == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    flags = ["--deepspeed_config", f"ds_configs/{preset}.json", "--grad-checkpointing", "--opt", opt]
    whole, weights = run(demo_folder, tmp_path, "whole", ranks, flags)
    checkpoint = str(tmp_path / "whole" / "checkpoints" / f"step_{SAVED:08d}")
    for name, first, more in (("again", 1, []), ("resumed", SAVED + 1, ["--resume", checkpoint])):
        curves, got = run(demo_folder, tmp_path, name, ranks, [*flags, *more])
        assert curves == {step: values for step, values in whole.items() if step >= first}, name
        assert all(torch.equal(got[key], weights[key]) for key in weights), name


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "opt"), CASES)
def test_on_a_gpu_runs_repeat_and_resume_bit_for_bit(demo_folder, tmp_path, preset, opt):
    check_bitwise(demo_folder, tmp_path, preset, opt, ranks=1)


@pytest.mark.multigpu
@pytest.mark.parametrize(("preset", "opt"), CASES)
def test_on_two_gpus_runs_repeat_and_resume_bit_for_bit(demo_folder, tmp_path, preset, opt):
    check_bitwise(demo_folder, tmp_path, preset, opt, ranks=2)


@pytest.mark.long
def test_the_mode_reaches_torch_cublas_and_the_compiler_and_does_not_write_to_reserved_memory():
    """DeepSpeed's buckets are gigabytes, of which a small model fills little."""
    code = """
import os, psutil, torch
from infcl.parallel import seed_everything
seed_everything(0, deterministic=True)
used = psutil.Process().memory_info().rss
reserved = torch.empty(2**28, dtype=torch.uint8)
assert psutil.Process().memory_info().rss - used < 2**26
import torch._inductor.config
assert torch.are_deterministic_algorithms_enabled()
assert torch._inductor.config.deterministic and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
