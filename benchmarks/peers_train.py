"""Compare trainers, each started as its users start it: `python -m benchmarks.peers_train`.

    open_clip   open_clip_train.main of the installed open_clip_torch (tested: 3.3); needs pandas
    inf_clip    --inf-clip DIR, a checkout of DAMO-NLP-SG/Inf-CLIP that includes inf_cl (tested: d9f2833, on GPUs);
                needs nvidia-ml-py (pynvml), pandas, ftfy and braceexpand
    infcl       pretrain_clip.py

All use the same model, precision, micro-batch and accumulation, one process per GPU, synthetic data and AdamW.
Everything else is each program's default, except that open_clip gets --local-loss --gather-with-grad on several GPUs.
Each setting runs in its own processes. A row has samples/s of the steps after --warm-up (median, mean, standard
deviation), and torch's peak memory of rank 0. These differences remain:

    data          open_clip and inf_clip crop synthetic images with PIL in --workers processes; infcl draws its images
                  once. "waiting" is the share of a step in which infcl waits for data
    accumulation  open_clip computes the loss once per micro-batch; inf_clip (a gradient cache) and infcl compute it
                  once per step. open_clip and inf_clip keep all pixels on the GPU

The other programs' code is unchanged. If a program does not know a model, its config comes from infcl/models/configs.
Their steps are timed with torch's hook after the optimizer step, which synchronises the GPU. inf_clip needs a process
group even for one process, so it gets one.

A setting that fails or hangs (--time-out) becomes a row with the cause.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.clock import hardware
from benchmarks.processes import exit_on_sigterm, reason, torchrun
from benchmarks.processes import run as run_command
from benchmarks.rows import ROOT, append, parser_of_rows
from infcl.parallel.host_info import git_commit
from infcl.report import read_metrics

COLUMNS = (
    "program", "version", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq",
    "global_batch", "status", "samples_per_second", "mean", "std", "steps", "waiting", "peak_gib", "workers",
    "device", "torch", "triton", "commit",
)  # fmt: skip
RESULT = "RESULT "


def main() -> None:
    options = _parser().parse_args()
    if options.inside is not None:
        program, *flags = options.inside
        print(RESULT + json.dumps(train(program, flags)), flush=True)
        return
    exit_on_sigterm("benchmarks.peers_train")
    print(f"{'program':>10} {'blocks':>9} {'m x M':>9} {'samples/s':>10} {'std':>7} {'waiting':>8} {'peak GiB':>9}")
    for setting in settings(options):
        row = {"version": version_of(setting["program"], options)} | setting | run(setting, options)
        report(row | hardware(options.commit), options.csv)


def programs(options: argparse.Namespace) -> list[str]:
    """Return --programs; by default all, inf_clip only with its checkout."""
    if options.programs is not None:
        return options.programs.split(",")
    return [name for name in TRAINERS if name != "inf_clip" or options.inf_clip]


def version_of(program: str, options: argparse.Namespace) -> str:
    """Return the program's release or the commit of its checkout; empty for infcl, whose row has the commit."""
    if program == "inf_clip":
        return (git_commit(options.inf_clip) or "")[:7]
    return metadata.version("open_clip_torch") if program == "open_clip" else ""


def settings(options: argparse.Namespace) -> list[dict]:
    """Return the settings in order: for each accumulation and kind of blocks, all programs."""
    return [
        {
            "program": program, "gpus": options.gpus, "model": options.model, "precision": options.precision,
            "blocks": blocks, "checkpointing": int(options.grad_checkpointing), "micro_batch": options.batch_size,
            "accum_freq": accum_freq, "global_batch": options.gpus * options.batch_size * accum_freq,
            "workers": options.workers,
        }
        for accum_freq in map(int, options.accum_freq.split(","))
        for blocks in options.blocks.split(",")
        for program in programs(options)
    ]  # fmt: skip


def run(setting: dict, options: argparse.Namespace) -> dict:
    """Run a setting; return the program's figures, or a status with the cause of the failure."""
    with tempfile.TemporaryDirectory(prefix="infcl-peers-") as folder:
        trainer = TRAINERS[setting["program"]]
        flags = flags_of(setting, options.warm_up + options.steps, options.device, folder)
        environment = _environment(setting, options)
        failure, output = run_command(
            command(setting, flags), options.time_out, cwd=folder if trainer.module else ROOT, env=environment
        )
        if failure:
            return {"status": f"{failure}: {' '.join(reason(output))[:300]}"}
        said = _of_another(output) if trainer.module else _of_infcl(Path(folder))
    return row_of(said, options.warm_up)


def flags_of(setting: dict, steps: int, device: str, folder: str) -> list[str]:
    """Return the program's flags for `steps` optimizer steps; `folder` holds its data and its output."""
    program, compiled = setting["program"], setting["blocks"] == "compiled"
    flags = ["--train-num-samples", str(steps * setting["global_batch"]), "--model", setting["model"]]
    flags += ["--precision", setting["precision"], "--batch-size", str(setting["micro_batch"])]
    flags += ["--workers", str(setting["workers"]), "--epochs", "1", "--name", program]
    flags += ["--grad-checkpointing"] if setting["checkpointing"] else []
    flags += ["--dataset-type", "synthetic", "--accum-freq", str(setting["accum_freq"])]
    flags += ["--device", device] if program != "inf_clip" else []  # it runs on GPUs only
    flags += ["--torchcompile"] if compiled and program != "infcl" else []
    if program == "inf_clip":
        return [*flags, "--infloss", "--log_dir", "none", "--log-every-n-steps", str(10**9)]
    if program == "open_clip":
        flags += ["--local-loss", "--gather-with-grad"] if setting["gpus"] > 1 else []
        return [*flags, "--logs", "none"]  # no checkpoint
    flags += ["--compile-blocks", "on" if compiled else "off"]
    return [*flags, "--logs", folder, "--report-to", "none", "--skip-memory-check"]


def command(setting: dict, flags: list[str]) -> list[str]:
    """Return the command for one process per GPU. Without "--", torchrun would read --logs as its own flag."""
    module, program = ["-m"], ["benchmarks.peers_train", "--inside", setting["program"]]
    if not TRAINERS[setting["program"]].module:
        module, program = [], [str(ROOT / "pretrain_clip.py")]
    return [*torchrun(setting["gpus"]), *module, *(["--"] if setting["gpus"] > 1 else []), *program, *flags]


def _of_another(output: str) -> dict[str, list[float]]:
    found = [json.loads(line[len(RESULT) :]) for line in output.splitlines() if line.startswith(RESULT)]
    return next((said for said in found if said["samples_per_second"]), {"samples_per_second": []})


def _of_infcl(folder: Path) -> dict[str, list[float]]:
    records = read_metrics(folder / "infcl" / "metrics.jsonl", "train")
    said = {"samples_per_second": "samples_per_second", "waiting": "data_wait"}
    values = {name: [record[key] for record in records] for name, key in said.items()}
    return values | {"peak_gib": [record["peak_memory_mb"] / 1024 for record in records]}


def row_of(said: dict[str, list[float]], warm_up: int) -> dict:
    """Summarise a program's figures per step as columns of a row."""
    rates = said["samples_per_second"][warm_up:]
    if len(rates) < 2:
        return {"status": f"only {len(said['samples_per_second'])} steps are in its log"}
    return {
        "status": "ok",
        "samples_per_second": round(statistics.median(rates), 2),
        "mean": round(statistics.mean(rates), 2),
        "std": round(statistics.stdev(rates), 2),
        "steps": len(rates),
        "waiting": round(statistics.median(said["waiting"][warm_up:]), 4) if said["waiting"] else None,
        "peak_gib": round(max(said["peak_gib"]), 2),
    }


def report(row: dict, path: Path | None) -> None:
    """Print a row; append it to the CSV."""
    shape = f"{row['micro_batch']} x {row['accum_freq']}"
    text = row["status"]
    if text == "ok":
        waiting = "-" if row["waiting"] is None else f"{row['waiting']:.1%}"
        text = f"{row['samples_per_second']:10.1f} {row['std']:7.1f} {waiting:>8} {row['peak_gib']:9.1f}"
    print(f"{row['program']:>10} {row['blocks']:>9} {shape:>9} {text}", flush=True)
    append(path, [row], COLUMNS)


def _environment(setting: dict, options: argparse.Namespace) -> dict[str, str]:
    """Return an environment with the packages of infcl and of the checkout, and without GPUs for --device cpu."""
    own = str(options.inf_clip.resolve()) if setting["program"] == "inf_clip" else None
    paths = [str(ROOT), own, os.environ.get("PYTHONPATH")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else found


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_rows(__doc__)
    parser.add_argument(
        "--programs", default=None, help="comma-separated; default: all whose checkout is given or not needed"
    )
    parser.add_argument("--inf-clip", type=Path, metavar="DIR", help="a git checkout of DAMO-NLP-SG/Inf-CLIP")
    parser.add_argument("--model", default="ViT-L-14", help="a name that all know, or a JSON file's absolute path")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="micro-batch of a GPU")
    parser.add_argument("--accum-freq", default="1,8", help="micro-batches a step, comma-separated")
    parser.add_argument("--blocks", default="eager,compiled", help="of eager and compiled (others: --torchcompile)")
    parser.add_argument("--precision", default="amp_bf16", choices=("amp_bf16", "fp32"))
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="processes that decode, of a GPU")
    parser.add_argument("--steps", type=int, default=10, help="that count, 2 or more")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--time-out", type=float, default=180.0, help="seconds that one setting may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--inside", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    return parser


# ---- the programs ----


class Trainer(NamedTuple):
    """How to import a program."""

    module: str  # module that has main(flags); "": pretrain_clip.py
    models: str = ""  # module that has add_model_config and list_models


TRAINERS = {  # in the order of the rows
    "open_clip": Trainer("open_clip_train.main", "open_clip"),
    "inf_clip": Trainer("inf_clip.train.main", "inf_clip"),
    "infcl": Trainer(""),
}
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def train(program: str, flags: list[str]) -> dict[str, list[float]]:
    """Run another program's trainer in this process and folder; --model may be a JSON file.

    Returns:
        samples_per_second of all GPUs for each step (the first one includes the start-up), waiting (empty), peak_gib.
    """
    trainer, flags = TRAINERS[program], list(flags)
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)
    models, at = import_module(trainer.models), flags.index("--model") + 1
    if flags[at].endswith(".json"):
        models.add_model_config(flags[at])
        flags[at] = Path(flags[at]).stem
    elif flags[at] not in models.list_models():
        models.add_model_config(ROOT / "infcl" / "models" / "configs")
    times = [time.perf_counter()]

    def note(*_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(note)
    import_module(trainer.module).main(flags)
    hook.remove()
    numbers = [int(flags[flags.index(name) + 1]) for name in ("--batch-size", "--accum-freq")]
    samples = math.prod(numbers) * int(os.environ["WORLD_SIZE"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    rates = [samples / (end - start) for start, end in pairwise(times)]
    return {"samples_per_second": rates, "waiting": [], "peak_gib": [peak]}


if __name__ == "__main__":
    main()
