"""Where a step's GPU time goes, from the trace of a run's --profile: `python -m benchmarks.kernels TRACE --steps 3`.

    TRACE        trace_rank0.json.gz of RUN/profile
    --steps N    that were profiled
    --csv FILE   write a row for each kernel: what it is of, its name, calls and milliseconds a step
    --label      of the rows: model and flags

Prints milliseconds and share of each kind. `products` are the library's, with their biases; `between` are pauses, in
which no kernel runs. Kernels that run at once count twice, and lessen `between`.
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

from benchmarks.clock import hardware
from benchmarks.rows import append, read

# The first that is in a kernel's name says what it is of: Inductor names kernels after the operations they hold.
KINDS = (
    ("products", ("nvjet", "cublas", "cutlass", "gemm", "gemv")),
    ("between GPUs", ("nccl",)),
    ("GELU", ("gelu",)),
    ("norms", ("norm",)),
    ("sums over rows (biases)", ("_sum", "reduce_kernel")),
    ("casts", ("_to_copy",)),
    ("residuals", ("fused_add",)),
    ("gradients added up", ("CUDAFunctor_add",)),
    ("optimizer", ("multi_tensor_apply",)),
    ("copies", ("Memcpy", "Memset")),
)
ATTENTION = ("_forward", "_backward", "_delta")  # names of the Triton kernels, whole


def kind_of(name: str) -> str:
    """'GELU' of 'triton_poi_fused_gelu_view_8'; 'others' of what is not known."""
    if name in ATTENTION or "flash" in name or "fmha" in name:
        return "attention"
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "others")


def kernels_of(trace: dict, steps: int) -> list[dict]:
    """[{kind, kernel, calls, ms}] a step, the longest first; `between` is a row of its own."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not events:
        raise ValueError("no kernel is in it: was the run on a GPU?")
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event["name"]].append(event["dur"])
    rows: list[dict] = [
        {"kind": kind_of(name), "kernel": name[:120], "calls": len(found) / steps, "ms": sum(found) / steps / 1e3}
        for name, found in times.items()
    ]
    whole = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    pauses = whole / steps / 1e3 - sum(row["ms"] for row in rows)
    rows.append({"kind": "between", "kernel": "", "calls": 0.0, "ms": max(0.0, pauses)})
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--csv", type=Path, default=None)
    for name in ("commit", "torch", "triton"):
        parser.add_argument(f"--{name}", default=None, help="of the run, for the CSV; default: what is here")
    options = parser.parse_args()
    try:
        with gzip.open(options.trace, "rt") as file:
            trace = json.load(file)
        rows = kernels_of(trace, options.steps)
    except (OSError, ValueError) as error:
        parser.error(f"{options.trace}: {error}")
    kinds: dict[str, float] = defaultdict(float)
    for row in rows:
        kinds[row["kind"]] += row["ms"]
    for kind, ms in sorted(kinds.items(), key=lambda entry: -entry[1]):
        print(f"{kind:<26}{ms:>10.1f} ms {ms / sum(kinds.values()):>7.1%}")
    where = hardware(options.commit) | {"device": trace["deviceProperties"][0]["name"]}
    where |= {name: value for name in ("torch", "triton") if (value := getattr(options, name))}
    if options.csv and (options.label, where["commit"]) in {(row["label"], row["commit"]) for row in read(options.csv)}:
        parser.error(f"{options.csv} has this --label at this commit already: give another, or take those rows out")
    append(options.csv, [{"label": options.label} | row | where for row in rows])


if __name__ == "__main__":
    main()
