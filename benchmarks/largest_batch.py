"""The largest global batch that fits (the paper's Table 2): `python -m benchmarks.largest_batch --gpus 4 ...`

Real steps of benchmarks.step on synthetic images, each trial in fresh processes with --memory-gb of GPU memory each,
which the allocator enforces. Abridged (benchmarks/abridged.py): the towers see a few micro-batches, all else is whole.
The planner says where to begin; then up or down in growing strides until the largest batch that fits and the smallest
that does not are within --tolerance. One CSV row per trial. --at B ... tries these batches instead, up to the first
that does not fit (the paper's Table 1). A trial that fails for another reason than GPU memory ends the command.

    --pixels gpu     pixels wait on the GPU between the passes (as in the paper without data offload; here as bytes)
    --pixels host    in host memory, as far as it has room, the rest is read twice (its "data offload")
    --max-batch N    no larger trial: the loss of N pairs takes time that grows with its square

Other flags are pretrain_clip.py's.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import append, read
from benchmarks.step import command, end_process, reason
from infcl.loss.contrastive import LOSSES
from infcl.plan.memory import memory_of
from infcl.plan.setting import Setting, load_gpu
from infcl.towers.config import load_model_config


@dataclass(frozen=True)
class Trial:
    batch: int
    peak_gib: float | None  # None: it did not fit
    said: str = ""


def main(arguments: list[str] | None = None) -> int:
    options, trainer_flags = _parser().parse_known_args(arguments)
    unit = options.gpus * options.batch_size
    if odd := [batch for batch in options.at if batch % unit]:
        raise SystemExit(f"--at {odd[0]} is no multiple of {options.gpus} GPUs x --batch-size {options.batch_size}")
    start = options.start or planned(options, unit)
    print(
        f"{options.model}, {options.gpus} GPU(s) of {options.memory_gb:g} GB, pixels on the {options.pixels}",
        flush=True,
    )
    if not options.at:
        print(f"begin at {start:,} pairs", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before an answer was found"))

    def trial(batch: int) -> Trial:
        result, row = run_trial(options, trainer_flags, batch)
        shown = f"{result.peak_gib:.1f} GiB" if result.peak_gib is not None else f"does not fit ({result.said})"
        print(f"{batch:>12,} pairs: {shown}", flush=True)
        if options.csv is not None:
            append(options.csv, [row])
        return result

    if options.at:
        for batch in sorted(options.at):
            if trial(batch).peak_gib is None:
                break
        return 0
    best = search(trial, start, unit, tolerance=options.tolerance, limit=options.max_batch, trials=options.trials)
    print(f"largest that fits: {best:,} pairs" if best else "nothing fits", flush=True)
    return 0 if best else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=80.0, help="1e9 bytes that each process may allocate")
    parser.add_argument("--batch-size", type=int, default=256, help="micro-batch")
    parser.add_argument("--pixels", choices=("gpu", "host"), default="gpu")
    parser.add_argument("--loss", choices=LOSSES, default="inf_cl")
    parser.add_argument("--precision", choices=("bf16", "amp_bf16", "fp32"), default="bf16")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--at", type=int, nargs="+", default=[], help="pairs: these batches instead of a search")
    parser.add_argument("--steps", type=int, default=2, help="of each trial")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--start", type=int, default=None, help="pairs of the first trial [the plan's]")
    parser.add_argument("--max-batch", type=int, default=1 << 40)
    parser.add_argument("--trials", type=int, default=8, help="at most")
    parser.add_argument("--time-out", type=float, default=120.0, help="seconds of a trial")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    return parser


def planned(options: argparse.Namespace, unit: int) -> int:
    """The largest batch by the planner's account of memory, less 3%; a multiple of `unit`."""
    pairs, _ = planned_for(
        options.model,
        options.gpus,
        0.97e9 * options.memory_gb,
        pixels=options.pixels,
        micro_batch=options.batch_size,
        precision=options.precision,
        checkpointing=not options.no_checkpointing,
        loss=options.loss,
    )
    return min(pairs, options.max_batch // unit * unit)


def planned_for(
    model: str, gpus: int, usable_bytes: float, *, pixels: str, micro_batch: int = 256, loss: str = "inf_cl", **changes
) -> tuple[int, float]:
    """(pairs, bytes of a GPU): the largest batch whose planned peak is at most `usable_bytes`; at least two units."""
    config = load_model_config(model)
    unit = gpus * micro_batch
    common = {"precision": "bf16", "compiled": False, "loss": {"disco": "open_clip"}.get(loss, loss)} | changes
    common["pixels"] = {"gpu": "device"}.get(pixels, pixels)

    def peak(count: int) -> float:
        setting = Setting(
            model=config, gpu=load_gpu("h200"), gpus=gpus, gpus_per_node=min(gpus, 8), global_batch=count * unit,
            micro_batch=micro_batch, **common,
        )  # fmt: skip
        return memory_of(setting)["peak"]

    count = 2
    while peak(count * 2) <= usable_bytes:
        count *= 2
    stride = count // 2
    while stride:
        count += stride if peak(count + stride) <= usable_bytes else 0
        stride //= 2
    return count * unit, peak(count)


def search(trial: Callable[[int], Trial], start: int, unit: int, *, tolerance: float, limit: int, trials: int) -> int:
    """The largest batch that fits, within `tolerance` of one that does not (or of `limit`); 0 when none was found."""
    below, above, stride, batch = 0, None, tolerance, start
    for _ in range(trials):
        if trial(batch).peak_gib is None:
            above = batch
        else:
            below = batch
        if below and above is not None and above <= below * (1 + tolerance) + unit:
            break
        if below and below >= limit // unit * unit:
            break
        if below and above is not None:
            batch = (below + above) // 2
        else:
            batch = min(limit, int(batch * (1 + stride))) if below else int(batch / (1 + stride))
            stride *= 2
        batch = max(unit, below + unit, batch // unit * unit)
        if batch > limit or batch == above:
            break
    else:
        beyond = "no batch was too large" if above is None else f"{above:,} do not fit"
        print(f"{trials} trials are spent: {below:,} pairs fit, {beyond}", flush=True)
    return below


def trial_flags(options: argparse.Namespace, batch: int, path: Path) -> list[str]:
    """Of benchmarks.step, for one trial whose row goes to `path`."""
    values = {
        "--gpus": options.gpus, "--model": options.model, "--zero": 1, "--precision": options.precision,
        "--loss": options.loss, "--batch-size": options.batch_size,
        "--accum-freq": batch // options.gpus // options.batch_size, "--memory-gb": options.memory_gb,
        "--compile-blocks": "off", "--measured-steps": 1, "--warm-up-steps": options.steps - 1,
        "--pixel-cache": options.pixels, "--csv": path, "--label": "largest batch",
    }  # fmt: skip
    values |= {"--commit": options.commit} if options.commit else {}
    flags = [str(word) for pair in values.items() for word in pair]
    return [
        *flags,
        "--abridged",
        "--skip-memory-check",
        *([] if options.no_checkpointing else ["--grad-checkpointing"]),
    ]


def memory_cause(output: str) -> str | None:
    """The line of a failed trial's output that says GPU memory ran out, None: it failed for another reason."""
    lines = (line.strip() for line in output.splitlines())
    return next(
        (line for line in lines if re.search(r"OutOfMemoryError|CUDA\b.*out of memory|_ALLOC_FAILED", line)), None
    )


def run_trial(options: argparse.Namespace, trainer_flags: list[str], batch: int) -> tuple[Trial, dict]:
    """One batch in processes of its own; SystemExit with the reason where it fails for another one than GPU memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.csv"
        process = subprocess.Popen(
            command(options.gpus, [*trial_flags(options, batch, path), *trainer_flags]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=options.time_out)[0]
        except subprocess.TimeoutExpired:
            output = end_process(process) + f"\nTimeoutError: no result in {options.time_out:.0f} s"
        finally:
            if process.poll() is None:
                end_process(process)
        measured = next(iter(read(path)), None)
    key = {"model": options.model, "gpus": options.gpus, "memory_gb": options.memory_gb, "pixels": options.pixels}
    key |= {"loss": options.loss, "precision": options.precision, "checkpointing": int(not options.no_checkpointing)}
    key |= {"micro_batch": options.batch_size, "global_batch": batch, "fits": int(measured is not None)}
    names = ("peak_gib", "seconds_loss", "step_seconds", "device", "torch", "triton", "deepspeed", "commit")
    row = key | {name: (measured or {}).get(name, "") for name in names} | {"said": ""}
    if measured is not None:
        return Trial(batch, float(measured["peak_gib"])), row
    cause = memory_cause(output)
    if cause is None:
        raise SystemExit(
            f"{output[-3000:]}\n{batch:,} pairs: no answer, for another reason than memory: {reason(output)[0]}"
        )
    row["said"] = cause[:200]
    return Trial(batch, None, cause[:100]), row


if __name__ == "__main__":
    raise SystemExit(main())
