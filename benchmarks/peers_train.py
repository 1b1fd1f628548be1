"""open_clip's trainer and ours side by side, each started as its users start it: `python -m benchmarks.peers_train`.

    open_clip   open_clip_train.main of the installed open_clip_torch (3.3 was tested; it wants pandas beside it)
    infcl       pretrain_clip.py

The same model, precision, micro-batch and accumulation, one process a GPU, synthetic data, AdamW, all else as each
program has it by default; with several GPUs open_clip gets --local-loss --gather-with-grad. Every setting runs in
processes of its own. A row: samples/s as each program says them for each step (both wait for the GPU there), median,
mean and standard deviation of the steps after --warm-up, and peak memory (torch's, rank 0). Two differences stay:

    data          open_clip's synthetic images go through PIL's crop in --workers processes, ours are drawn once, so
                  "waiting" is the share of a step that infcl waited for data; what open_clip calls so holds its wait
                  for the GPU
    accumulation  with --accum-freq above 1 open_clip takes the loss once for each micro-batch, and keeps all pixels

A setting that fails or hangs (--time-out) becomes a row that says so.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.clock import hardware
from benchmarks.rows import append
from benchmarks.step import end_process, reason
from infcl.report import read_metrics

ROOT = Path(__file__).parent.parent
PROGRAMS = ("open_clip", "infcl")
COLUMNS = (
    "program", "version", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq",
    "global_batch", "status", "samples_per_second", "mean", "std", "steps", "waiting", "peak_gib", "workers",
    "device", "torch", "triton", "commit",
)  # fmt: skip
RESULT = "RESULT "


def main() -> None:
    options = _parser().parse_args()
    if options.inside is not None:
        print(RESULT + json.dumps(train_open_clip(options.inside)), flush=True)
        return
    if "open_clip" in options.programs.split(","):
        missing = [name for name in ("open_clip_train", "pandas") if importlib.util.find_spec(name) is None]
        if missing:
            raise SystemExit(f"open_clip's trainer needs {', '.join(missing)}: pip install open_clip_torch pandas")
    print(f"{'program':>10} {'blocks':>9} {'m x M':>9} {'samples/s':>10} {'std':>7} {'waiting':>8} {'peak GiB':>9}")
    for setting in settings(options):
        report(setting | run(setting, options) | hardware(options.commit), options.csv)


def settings(options: argparse.Namespace) -> list[dict]:
    """What is run, in order: of each accumulation and kind of blocks the programs one after the other."""
    return [
        {
            "program": program, "gpus": options.gpus, "model": options.model, "precision": options.precision,
            "blocks": blocks, "checkpointing": int(options.grad_checkpointing), "micro_batch": options.batch_size,
            "accum_freq": accum_freq, "global_batch": options.gpus * options.batch_size * accum_freq,
            "workers": options.workers,
        }
        for accum_freq in map(int, options.accum_freq.split(","))
        for blocks in options.blocks.split(",")
        for program in options.programs.split(",")
    ]  # fmt: skip


def run(setting: dict, options: argparse.Namespace) -> dict:
    """What is added to a setting's row: what its program said, or a status that says why there is nothing."""
    with tempfile.TemporaryDirectory(prefix="infcl-peers-") as folder:
        flags = flags_of(setting, options.warm_up + options.steps, options.device, folder)
        process = subprocess.Popen(
            command(setting, flags), cwd=ROOT if setting["program"] == "infcl" else folder,
            env=os.environ | {"PYTHONPATH": _python_path()},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=options.time_out)
        except subprocess.TimeoutExpired:
            return {"status": f"no result in {options.time_out:.0f} s: {_cause(end_process(process))}"}
        except BaseException:  # Ctrl-C too: its processes end with this one
            end_process(process)
            raise
        if process.returncode:
            return {"status": f"exit code {process.returncode}: {_cause(output)}"}
        said = _of_infcl(Path(folder)) if setting["program"] == "infcl" else _of_open_clip(output)
    return row_of(said, options.warm_up)


def _cause(output: str) -> str:
    first, *others = reason(output)  # "..." where no line looks like one
    return first if first != "..." else "".join(others[-1:])


def flags_of(setting: dict, steps: int, device: str, folder: str) -> list[str]:
    """Of the setting's program, for so many optimizer steps; what it writes goes to `folder`."""
    pairs = ("model", "precision", "micro_batch", "accum_freq", "workers")
    names = {"micro_batch": "batch-size", "accum_freq": "accum-freq"}
    flags = ["--dataset-type", "synthetic", "--train-num-samples", str(steps * setting["global_batch"])]
    flags += [word for name in pairs for word in (f"--{names.get(name, name)}", str(setting[name]))]
    flags += ["--epochs", "1", "--device", device, "--name", setting["program"]]
    flags += ["--grad-checkpointing"] if setting["checkpointing"] else []
    compiled = setting["blocks"] == "compiled"
    if setting["program"] == "infcl":
        flags += ["--compile-blocks", "on" if compiled else "off", "--logs", folder, "--report-to", "none"]
        return [*flags, "--skip-memory-check"]
    flags += ["--torchcompile"] if compiled else []
    flags += ["--local-loss", "--gather-with-grad"] if setting["gpus"] > 1 else []
    return [*flags, "--log-every-n-steps", "1", "--logs", "none"]  # none: no checkpoint, the log in ./none


def command(setting: dict, flags: list[str]) -> list[str]:
    """A process for each GPU. Behind "--" nothing is torchrun's, which would take --logs for a flag of its own."""
    module, program = ["-m"], ["benchmarks.peers_train", "--inside"]
    if setting["program"] == "infcl":
        module, program = [], [str(ROOT / "pretrain_clip.py")]
    if setting["gpus"] == 1:
        return [sys.executable, *module, *program, *flags]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting['gpus']}"]
    return [*launcher, *module, "--", *program, *flags]


def train_open_clip(flags: list[str]) -> dict[str, list[float]]:
    """open_clip's trainer in this process and folder. Of each step samples/s; peak GiB.

    --model may be a JSON file of a model.
    """
    import open_clip
    from open_clip_train.main import main as train

    flags = list(flags)
    model, name = flags.index("--model") + 1, flags[flags.index("--name") + 1]
    if flags[model].endswith(".json"):
        open_clip.add_model_config(flags[model])
        flags[model] = Path(flags[model]).stem
    train(flags)
    said: dict[str, list[float]] = {"samples_per_second": [], "waiting": []}
    if os.environ.get("RANK", "0") == "0":
        log = Path("none", name, "out.log").read_text()
        for rate in re.findall(r"Batch \(t\): \S+, ([\d.e+]+)/s", log):
            said["samples_per_second"].append(float(rate))
    return said | {"peak_gib": [torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0]}


def _of_open_clip(output: str) -> dict[str, list[float]]:
    found = [json.loads(line[len(RESULT) :]) for line in output.splitlines() if line.startswith(RESULT)]
    return next((said for said in found if said["samples_per_second"]), {"samples_per_second": []})


def _of_infcl(folder: Path) -> dict[str, list[float]]:
    records = read_metrics(folder / "infcl" / "metrics.jsonl", "train")
    said = {"samples_per_second": "samples_per_second", "waiting": "data_wait"}
    values = {name: [record[key] for record in records] for name, key in said.items()}
    return values | {"peak_gib": [record["peak_memory_mb"] / 1024 for record in records]}


def row_of(said: dict[str, list[float]], warm_up: int) -> dict:
    """Of what a program said about each of its steps."""
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
    row = {"version": metadata.version("open_clip_torch") if row["program"] == "open_clip" else ""} | row
    shape = f"{row['micro_batch']} x {row['accum_freq']}"
    text = row["status"]
    if text == "ok":
        waiting = "-" if row["waiting"] is None else f"{row['waiting']:.1%}"
        text = f"{row['samples_per_second']:10.1f} {row['std']:7.1f} {waiting:>8} {row['peak_gib']:9.1f}"
    print(f"{row['program']:>10} {row['blocks']:>9} {shape:>9} {text}", flush=True)
    append(path, [row], COLUMNS)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="comma-separated")
    parser.add_argument("--model", default="ViT-L-14", help="a name that both know, or a JSON file's absolute path")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="micro-batch of a GPU")
    parser.add_argument("--accum-freq", default="1,8", help="micro-batches a step, comma-separated")
    parser.add_argument("--blocks", default="eager,compiled", help="of eager and compiled (open_clip: --torchcompile)")
    parser.add_argument("--precision", default="amp_bf16", choices=("amp_bf16", "fp32"))
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="processes that decode, of a GPU")
    parser.add_argument("--steps", type=int, default=10, help="that count, 2 or more")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--time-out", type=float, default=180.0, help="seconds that one setting may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--csv", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
