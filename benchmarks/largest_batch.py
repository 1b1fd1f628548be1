"""Find the largest global batch that fits (the paper's Table 2): `python -m benchmarks.largest_batch --gpus 4 ...`

A trial is a step of the trainer on synthetic images, in real processes. The allocator limits each process to
--memory-gb of GPU memory. Steps are abridged: the towers encode only a few micro-batches;
everything else is complete. One engine runs all batches, one after another (benchmarks/trials.py).

The search begins at the planner's estimate and moves up or down in growing strides. It ends when the largest batch that
fits and the smallest that does not are within --tolerance. Each trial is a CSV row. --at B ... tries these batches
instead, up to the first that does not fit (the paper's Table 1). Several values of --loss and --pixels are tried one
after another. A trial that fails for another reason than GPU memory ends the command.

    --pixels gpu     cache pixels on the GPU between the passes (as in the paper without data offload; here as uint8)
    --pixels host    cache pixels in host memory, and read those that do not fit twice (the paper's "data offload")
    --max-batch N    the largest trial: the time of the loss grows with the square of the batch

Other flags are pretrain_clip.py's.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import exit_on_sigterm, reason, stop
from benchmarks.rows import append, parser_of_rows, read
from benchmarks.step import command
from infcl.loss.contrastive import LOSSES
from infcl.models.config import load_model_config
from infcl.plan.memory import memory_of
from infcl.plan.profile import USABLE, load_gpu
from infcl.plan.search import largest_batch
from infcl.plan.setting import Setting


@dataclass(frozen=True)
class Trial:
    batch: int
    peak_gib: float | None  # None: does not fit


# Share of a memory limit that the allocator can fill. A step planned at 0.988 of 80 GB did not fit.
FILLED = 0.985


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, trainer_flags = _parser().parse_known_args(arguments)
    if options.rows is not None:
        from benchmarks.trials import run

        run(options, trainer_flags, lambda trials: _plan(options, trials, say=lambda text: None))
        return 0
    unit = options.gpus * options.batch_size
    if odd := [batch for batch in options.at if batch % unit]:
        raise SystemExit(f"--at {odd[0]} is no multiple of {options.gpus} GPUs x --batch-size {options.batch_size}")
    if "siglip" in options.loss and len(options.loss) > 1:
        raise SystemExit("--loss siglip makes another model (its scale and bias): try it in a command of its own")
    exit_on_sigterm("benchmarks.largest_batch")
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.csv"
        while True:
            answers = {(row["loss"], row["pixels"], row["global_batch"]): row for row in read(rows)}
            try:
                _plan(options, partial(_answer, answers), say=print)
                return 0 if any(row["fits"] for row in answers.values()) else 1
            except _Unanswered:
                _launch(options, arguments, rows)


class _Unanswered(LookupError):
    """A trial that has no row yet."""


def _answer(answers: dict[tuple[str, str, int], dict], *trial) -> dict:
    if trial not in answers:
        raise _Unanswered(trial)
    return answers[trial]


def _plan(options: argparse.Namespace, trials: Callable[[str, str, int], dict], say: Callable[[str], None]) -> None:
    """Search or try batches with trials(loss, pixels, batch).

    Ranks call this with real trials; the command calls it with the rows of the finished ones.
    """
    unit = options.gpus * options.batch_size
    for loss in options.loss:
        for pixels in options.pixels:

            def trial(batch: int, loss=loss, pixels=pixels) -> Trial:
                row = trials(loss, pixels, batch)
                return Trial(batch, row["peak_gib"] if row["fits"] else None)

            if options.at:
                for batch in sorted(options.at):
                    if trial(batch).peak_gib is None:
                        break
                continue
            start = max(unit, (options.first or planned(options, loss, pixels, unit)) // unit * unit)
            best, said = search(
                trial, start, unit, tolerance=options.tolerance, limit=options.max_batch, trials=options.trials
            )
            say(said + f"{loss}, pixels {pixels}: " + (f"at most {best:,} pairs fit" if best else "nothing fits"))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=80.0, help="1e9 bytes that each process may allocate")
    parser.add_argument("--batch-size", type=int, default=256, help="micro-batch")
    parser.add_argument("--pixels", choices=("gpu", "host"), nargs="+", default=["gpu"])
    parser.add_argument("--loss", choices=LOSSES, nargs="+", default=["inf_cl"])
    parser.add_argument("--precision", choices=("bf16", "amp_bf16", "fp32"), default="bf16")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--at", type=int, nargs="+", default=[], help="pairs: these batches instead of a search")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--first", type=int, default=None, help="pairs of the first trial [the plan's]")
    parser.add_argument("--max-batch", type=int, default=1 << 40)
    parser.add_argument("--trials", type=int, default=8, help="of a search, at most")
    parser.add_argument("--time-out", type=float, default=300.0, help="seconds without the end of a trial")
    parser.add_argument("--rows", type=Path, default=None, help=argparse.SUPPRESS)  # set in the processes of the trials
    return parser


def planned(options: argparse.Namespace, loss: str, pixels: str, unit: int) -> int:
    """Return the largest batch that the planner fits into 97% of the memory; a multiple of `unit`."""
    setting = _setting(
        options.model,
        options.gpus,
        unit,
        pixels=pixels,
        micro_batch=options.batch_size,
        precision=options.precision,
        checkpointing=not options.no_checkpointing,
        loss=loss,
    )
    memory_gib = FILLED * 0.97e9 * options.memory_gb / USABLE / 2**30
    largest = largest_batch(setting.with_(gpu=dataclasses.replace(setting.gpu, memory_gib=memory_gib)))
    return min(largest, options.max_batch // unit * unit)


def planned_peak(model: str, gpus: int, pairs: int, **options: Any) -> float:
    """Return the planned peak in bytes per GPU of a step of `pairs` samples, with the options of `_setting`."""
    return memory_of(_setting(model, gpus, pairs, **options))["peak"]


def _setting(model: str, gpus: int, pairs: int, *, pixels: str, **options: Any) -> Setting:
    """Return the setting of a step of `pairs` samples with eager blocks; `options` are further fields of it."""
    fields: dict[str, Any] = {"precision": "bf16", "compiled": False, "checkpointing": True} | options
    return Setting(
        model=load_model_config(model), gpu=load_gpu("h200"), gpus=gpus, gpus_per_node=min(gpus, 8), global_batch=pairs,
        pixels={"gpu": "device"}.get(pixels, pixels),
        **fields,
    )  # fmt: skip


def search(
    trial: Callable[[int], Trial], start: int, unit: int, *, tolerance: float, limit: int, trials: int
) -> tuple[int, str]:
    """Search the largest batch that fits.

    Args:
        trial: runs a batch.
        start: first batch to try.
        unit: batches are multiples of it.
        tolerance: largest relative distance between the result and a batch that does not fit.
        limit: largest batch to try.
        trials: largest number of trials.

    Returns:
        The batch, 0 if none fits.
        A message if the trials ran out before the search ended, else "".
    """
    said = ""
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
        said = f"{trials} trials are spent: {below:,} pairs fit, {beyond}\n"
    return below, said


def memory_cause(output: str) -> str | None:
    """Return the line of a failed trial's output that reports exhausted GPU memory; None: another cause."""
    lines = (line.strip() for line in output.splitlines())
    return next(
        (line for line in lines if re.search(r"OutOfMemoryError|CUDA\b.*out of memory|_ALLOC_FAILED", line)), None
    )


def _launch(options: argparse.Namespace, arguments: list[str], rows: Path) -> None:
    """Start processes that run the trials missing in `rows`, to the end or until one runs out of memory.

    In any case, --csv gets all finished trials.

    Raises:
        SystemExit: a trial failed for another reason than memory.
    """
    begun, errors, done = rows.with_name("begun.json"), rows.with_name("errors.txt"), len(read(rows))
    with errors.open("w") as file:
        process = subprocess.Popen(
            command(options.gpus, [*arguments, "--rows", str(rows)], "benchmarks.largest_batch"),
            stderr=file, start_new_session=True,
        )  # fmt: skip
        late = _wait(process, rows, done, options.csv, options.time_out)
    if process.returncode == 0:
        if len(read(rows)) == done:
            raise SystemExit("the processes ended without a trial")
        return
    output = errors.read_text(errors="replace") + late
    cause, key = memory_cause(output), json.loads(begun.read_text()) if begun.exists() else {}
    if cause is None or not key:
        where = f"{key['global_batch']:,} pairs" if key else "before the first trial"
        why = f"no answer, for another reason than memory: {reason(output)[0]}" if cause is None else cause
        raise SystemExit(f"{output[-3000:]}\n{where}: {why}")
    from benchmarks.trials import COLUMNS, versions

    row = key | versions(options.commit) | {"fits": 0, "said": cause[:200]}
    append(rows, [row], COLUMNS)
    append(options.csv, [row], COLUMNS)
    print(f"{key['loss']:>10} {key['pixels']:>5} {key['global_batch']:>12,} pairs: does not fit", flush=True)
    begun.unlink()


def _wait(process: subprocess.Popen, rows: Path, done: int, csv: Path | None, seconds: float) -> str:
    """Wait for the process; stop it if no row arrives within `seconds`. Return a message in that case, else "".

    Rows after the first `done` are copied to `csv` as they arrive.
    """
    since = time.monotonic()

    def copy() -> int:
        new = read(rows)[done:]
        if new:
            append(csv, new)
        return len(new)

    try:
        while process.poll() is None and time.monotonic() - since < seconds:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(1.0, seconds))
            if new := copy():
                done, since = done + new, time.monotonic()
        return f"\nTimeoutError: no result in {seconds:.0f} s" if process.poll() is None else ""
    finally:
        copy()
        if process.poll() is None:
            stop(process)


if __name__ == "__main__":
    raise SystemExit(main())
