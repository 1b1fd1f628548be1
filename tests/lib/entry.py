"""pretrain_clip.py as users start it: alone, under torchrun, and forked from this process."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest import mock

import torch.distributed as dist

from infcl.report import read_metrics
from tests.lib import gpus
from tests.lib.checkout import GOLDEN_MODEL, ROOT
from tests.lib.ranks import free_port, run_ranks

_runs = count()  # equal on all ranks
ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(demo_folder, logs, *flags: str) -> list[str]:
    """Return pretrain_clip.py and the flags of a run of three steps of the demo; later flags replace them."""
    return [
        "pretrain_clip.py", "--train-data", f"{demo_folder}/train", "--tokenizer", f"{demo_folder}/tokenizer.model",
        "--model", GOLDEN_MODEL, "--workers", "1", "--batch-size", "16", "--accum-freq", "2", "--lr", "1e-3",
        "--wd", "0.05", "--warmup", "5", "--steps", "3", "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)",
        "--logs", str(logs), "--name", "run", "--resident-micro-batches", "1", *flags,
    ]  # fmt: skip


def launch(arguments: list[str], ranks: int, environment=ON_CPU) -> subprocess.CompletedProcess:
    """Run the command under the deepspeed launcher."""
    if gpus.RANKS_PER_GPU > 1 and environment.get("DS_ACCELERATOR") != "cpu":
        return gpus.run(arguments, ranks, free_port(), environ=environment, cwd=ROOT)
    launcher = ["-m", "deepspeed.launcher.runner", "-q", "--num_gpus", str(ranks), "--master_port", str(free_port())]
    return alone([*launcher, *arguments], environment)


def alone(arguments: list[str], environment=ON_CPU) -> subprocess.CompletedProcess:
    """Run the command in one process, without a launcher."""
    given, command = os.environ | environment, [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=400)


def forked(arguments: list[str], ranks: int) -> subprocess.CompletedProcess:
    """Run main() in the ranks of run_ranks, and return their output: faster than `launch` or `alone`.

    For tests that need no launcher and no process exit; but rank 0's end stops ranks that wait, as by a launcher. The
    ranks keep their process group. As daemons they cannot start processes, so use `--workers 0`.
    """
    done = run_ranks(_main, ranks, arguments[1:])
    codes, printed, errors = zip(*done)
    return subprocess.CompletedProcess(arguments, next(filter(None, codes), 0), "".join(printed), "".join(errors))


def _main(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str, str]:
    from pretrain_clip import main

    with contextlib.ExitStack() as stack:
        out, err = stack.enter_context(mock.patch("sys.stdout", io.StringIO())), io.StringIO()
        stack.enter_context(mock.patch("sys.stderr", err))
        stack.enter_context(mock.patch.object(logging.getLogger(), "handlers", []))  # else they keep this stderr
        stack.enter_context(mock.patch("torch.distributed.destroy_process_group"))
        ended = f"rank 0 ended run {next(_runs)}"
        stack.enter_context(mock.patch("infcl.parallel.process.time", SimpleNamespace(sleep=partial(_stopped, ended))))
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        except RuntimeError:  # main() raises it during a run, and python exits with 1; other errors fail the test
            traceback.print_exc()
            code = 1
        if rank == 0:
            dist.distributed_c10d._get_default_store().set(ended, "")
    return code, out.getvalue(), err.getvalue()


def _stopped(ended: str, seconds: float) -> NoReturn | None:
    """Wait until rank 0 has ended, then exit as by a launcher's signal; return after `seconds`."""
    try:
        dist.distributed_c10d._get_default_store().wait([ended], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return None
    raise SystemExit(2)


def golden(steps: int = 20) -> list[float]:
    """Return the golden losses of the demo's first steps, 64 pairs each."""
    return json.loads((ROOT / "tests" / "golden" / "demo_20_steps.json").read_text())["loss"][:steps]


def losses(logs: Path, name: str = "run") -> list[float]:
    """Return the losses in the run's metrics, by step."""
    return [record["loss"] for record in read_metrics(logs / name / "metrics.jsonl", "train")]
