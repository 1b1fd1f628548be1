"""Trainers of others and ours side by side, each started as its users start it: `python -m benchmarks.peers_train`.

    open_clip   the installed open_clip_torch
    inf_clip    --inf-clip DIR, a checkout; on GPUs only; it wants nvidia-ml-py (pynvml), pandas, ftfy and braceexpand
    fast_clip   --fast-clip DIR, a checkout
    eva_clip    --eva-clip DIR, a checkout
    infcl       pretrain_clip.py

The same model, precision, micro-batch and accumulation, one process a GPU, synthetic data, AdamW, all else as each
program has it by default (benchmarks/peer_trainers.py has the flags, and what it takes to start each); with several
GPUs open_clip and eva_clip get --local-loss --gather-with-grad. Every setting runs in processes of its own; a kind of
blocks or an accumulation that a program has not is left out. A row: samples/s as each program says them for each step
(all wait for the GPU there; inf_clip says means, so its steps are timed behind its optimizer's), median, mean and
standard deviation of the steps after --warm-up, and peak memory (torch's, rank 0). These differences stay:

    precision     eva_clip's autocast is to float16: with bfloat16 its weights and AdamW's states would be in it too
    objective     fast_clip's is another, FastCLIP-v3: its rate says what a step of it costs, not what it is worth
    data          synthetic images of open_clip, inf_clip and eva_clip go through PIL's crop in --workers processes;
                  fast_clip wants a number in each sample, so it reads JPEGs from shards, and its steps are rounded up
                  to a multiple of --workers; ours are drawn once, so "waiting" is the share of a step that infcl
                  waited for data; what the others call so holds their wait for the GPU
    accumulation  with --accum-freq above 1 open_clip takes the loss once for each micro-batch, inf_clip (a gradient
                  cache) and infcl once for all; open_clip and inf_clip keep all pixels on the GPU

A setting that fails or hangs (--time-out) becomes a row that says so.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.clock import hardware
from benchmarks.peer_trainers import ROOT, TRAINERS, shared_flags, train
from benchmarks.rows import append
from benchmarks.step import end_process, reason
from infcl.parallel.host_info import git_commit
from infcl.report import read_metrics

COLUMNS = (
    "program", "version", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq",
    "global_batch", "status", "samples_per_second", "mean", "std", "steps", "waiting", "peak_gib", "workers",
    "device", "torch", "triton", "commit",
)  # fmt: skip
SOURCES = {"inf_clip": "DAMO-NLP-SG/Inf-CLIP", "fast_clip": "Optimization-AI/fast_clip", "eva_clip": "baaivision/EVA"}
RESULT = "RESULT "


class Checkout(NamedTuple):
    folder: Path
    commit: str  # short


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.inside is not None:
        program, *flags = options.inside
        print(RESULT + json.dumps(train(program, flags)), flush=True)
        return
    for program in programs(options):
        if trouble := what_is_missing(program, checkout_of(program, options)):
            parser.error(trouble)
    if not settings(options):
        parser.error("none of the programs has one of these --blocks and --accum-freq")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks.peers_train: ended by SIGTERM"))  # and its program
    print(f"{'program':>10} {'blocks':>9} {'m x M':>9} {'samples/s':>10} {'std':>7} {'waiting':>8} {'peak GiB':>9}")
    for setting in settings(options):
        version = version_of(setting["program"], checkout_of(setting["program"], options))
        report({"version": version} | setting | run(setting, options) | hardware(options.commit), options.csv)


def programs(options: argparse.Namespace) -> list[str]:
    """Those of --programs; without it open_clip, infcl and those whose checkout is given."""
    if options.programs is not None:
        return options.programs.split(",")
    return [name for name, one in TRAINERS.items() if not one.folders or checkout_of(name, options)]


def checkout_of(program: str, options: argparse.Namespace) -> Checkout | None:
    return getattr(options, program, None)


def what_is_missing(program: str, checkout: Checkout | None) -> str:
    """To start a program here: a sentence, empty where nothing is missing."""
    if program not in TRAINERS:
        return f"no program {program!r}: one of {', '.join(TRAINERS)}"
    trainer, flag = TRAINERS[program], "--" + program.replace("_", "-")
    if trainer.folders and checkout is None:
        return f"{program} needs {flag}, a checkout"
    if checkout is not None:
        package = Path(trainer.folders[0], trainer.module.partition(".")[0])
        if not (checkout.folder / package).is_dir():
            return f"{flag}: no folder {package} in {checkout.folder}"
    names = [name for name in trainer.packages if importlib.util.find_spec(name) is None]
    return f"{program}'s trainer needs the packages {', '.join(names)} (docs/benchmarks/trainers.md)" if names else ""


def version_of(program: str, checkout: Checkout | None) -> str:
    """A release, or the commit of a checkout; ours is the row's own commit."""
    if checkout is not None:
        return checkout.commit
    return metadata.version("open_clip_torch") if program == "open_clip" else ""


def settings(options: argparse.Namespace) -> list[dict]:
    """What is run, in order: of each accumulation and kind of blocks the programs that have it, one after the other."""
    return [
        {
            "program": program, "gpus": options.gpus, "model": options.model,
            "precision": TRAINERS[program].autocast if options.precision == "amp_bf16" else options.precision,
            "blocks": blocks, "checkpointing": int(options.grad_checkpointing), "micro_batch": options.batch_size,
            "accum_freq": accum_freq, "global_batch": options.gpus * options.batch_size * accum_freq,
            "workers": options.workers,
        }
        for accum_freq in map(int, options.accum_freq.split(","))
        for blocks in options.blocks.split(",")
        for program in programs(options)
        if (accum_freq == 1 or TRAINERS[program].accumulates) and (blocks == "eager" or TRAINERS[program].compiles)
    ]  # fmt: skip


def run(setting: dict, options: argparse.Namespace) -> dict:
    """What is added to a setting's row: what its program said, or a status that says why there is nothing."""
    with tempfile.TemporaryDirectory(prefix="infcl-peers-") as folder:
        trainer = TRAINERS[setting["program"]]
        trainer.data(setting, Path(folder))
        flags = flags_of(setting, options.warm_up + options.steps, options.device, folder)
        process = subprocess.Popen(
            command(setting, flags), cwd=folder if trainer.module else ROOT, env=_environment(setting, options),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=options.time_out)
        except subprocess.TimeoutExpired:
            return {"status": f"no result in {options.time_out:.0f} s: {_cause(end_process(process))}"}
        except BaseException:  # Ctrl-C and SIGTERM: its processes end with this one
            end_process(process)
            raise
        if process.returncode:
            return {"status": f"exit code {process.returncode}: {_cause(output)}"}
        said = _of_another(output) if trainer.module else _of_infcl(Path(folder))
    return row_of(said, options.warm_up)


def _cause(output: str) -> str:
    first, *others = reason(output)  # "..." where no line looks like one
    return first if first != "..." else "".join(others[-1:])


def flags_of(setting: dict, steps: int, device: str, folder: str) -> list[str]:
    """Of the setting's program, for so many optimizer steps; `folder` holds its data and what it writes."""
    return shared_flags(setting, steps) + TRAINERS[setting["program"]].flags(setting, device, folder)


def command(setting: dict, flags: list[str]) -> list[str]:
    """A process for each GPU. Behind "--" nothing is torchrun's, which would take --logs for a flag of its own."""
    module, program = ["-m"], ["benchmarks.peers_train", "--inside", setting["program"]]
    if not TRAINERS[setting["program"]].module:
        module, program = [], [str(ROOT / "pretrain_clip.py")]
    if setting["gpus"] == 1:
        return [sys.executable, *module, *program, *flags]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting['gpus']}"]
    return [*launcher, *module, "--", *program, *flags]


def _of_another(output: str) -> dict[str, list[float]]:
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
    shape = f"{row['micro_batch']} x {row['accum_freq']}"
    text = row["status"]
    if text == "ok":
        waiting = "-" if row["waiting"] is None else f"{row['waiting']:.1%}"
        text = f"{row['samples_per_second']:10.1f} {row['std']:7.1f} {waiting:>8} {row['peak_gib']:9.1f}"
    print(f"{row['program']:>10} {row['blocks']:>9} {shape:>9} {text}", flush=True)
    append(path, [row], COLUMNS)


def _environment(setting: dict, options: argparse.Namespace) -> dict[str, str]:
    """Of a program: it finds our packages and its checkout's, and on --device cpu no GPU."""
    checkout = checkout_of(setting["program"], options)
    own = [] if checkout is None else [checkout.folder / folder for folder in TRAINERS[setting["program"]].folders]
    paths = [str(ROOT), *map(str, own), os.environ.get("PYTHONPATH")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else found


def _checkout(text: str) -> Checkout:
    """DIR, a git checkout, or DIR@COMMIT where it is none. Raises ArgumentTypeError."""
    folder, commit = (text, "") if Path(text).is_dir() or "@" not in text else text.rpartition("@")[::2]
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is no folder")
    path = Path(folder).resolve()
    if not commit and (path / ".git").exists():
        found = git_commit(path) or ""
        commit = found[:7] + found[40:]
    if not commit:
        raise argparse.ArgumentTypeError(f"{text} is no git checkout; DIR@COMMIT says which commit it is of")
    return Checkout(path, commit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--programs", default=None, help="comma-separated; default: all whose checkout is given or not needed"
    )
    for name, source in SOURCES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=_checkout, metavar="DIR", default=None,
            help=f"a checkout of {source}, or DIR@COMMIT where it is unpacked without git's folder",
        )  # fmt: skip
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
    parser.add_argument("--csv", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
