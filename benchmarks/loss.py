"""Time and memory of the contrastive losses, forward and backward: `python -m benchmarks.loss --gpus 1`.

Every implementation runs on the same features, in one process per GPU. The same run measures the rate of cuBLAS's
8192^3 BF16 GEMM, after a third of a second of GEMMs: a GPU at its power limit is slower.
TFLOP/s counts 8 B^2 D FLOPs for every loss (one pass over the tiles: 1 GEMM forward, 3 backward), divided by the number
of GPUs. Extra memory is the peak above the memory before the call (features), so it includes gradients. GPU ms is the
time without launch delays; a higher median shows the cost of launching kernels.
Prints a table; --csv appends the rows with commit, hardware and versions. --kernels also prints each loss's kernels.
--check prints precision instead.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.clock import affordable, library_tflops, refuse, require_gpus, timed
from benchmarks.clock import hardware as device_hardware
from benchmarks.loss_check import check
from benchmarks.loss_impls import NAMES, OTHERS, make
from benchmarks.processes import on_ranks
from benchmarks.rows import append, parser_of_rows
from infcl.loss.contrastive import TILED
from infcl.loss.links import RINGS

_AHEAD = 15_000_000  # cycles, about 8 ms: longer than the host needs to launch a loss
COLUMNS = (
    "impl", "gpus", "global_batch", "dim", "dtype", "median_ms", "mean_ms", "std_ms", "repeats",
    "tflops_per_gpu", "ratio_to_cublas", "extra_mib", "cublas_tflops", "device", "torch", "triton", "commit",
)  # fmt: skip


def main() -> None:
    arguments = _parse()
    if unknown := [impl for impl in arguments.impl.split(",") if impl not in NAMES]:
        refuse("benchmarks.loss", f"--impl: unknown loss '{unknown[0]}'; one of {', '.join(NAMES)}")
    require_gpus("benchmarks.loss", 1 if arguments.check else arguments.gpus)
    if arguments.check:
        on_ranks(_check, 1, arguments)
    else:
        on_ranks(_measure_all, arguments.gpus, arguments)


def _parse() -> argparse.Namespace:
    parser = parser_of_rows(__doc__)
    others = "; ".join(f"{name}: {what}" for name, what in OTHERS.items())
    impls = f"comma-separated, of {', '.join(NAMES)}. {others}"
    parser.add_argument("--impl", default="inf_cl,clip,open_clip,disco,siglip", help=impls)
    parser.add_argument("--batch", default="16384,65536", help="global batch sizes, comma-separated")
    parser.add_argument("--dim", default="768", help="embedding dimensions, comma-separated")
    parser.add_argument("--dtype", default="bfloat16", help="of the features")
    parser.add_argument("--tile-dtype", default=None, help="operands of the tiled losses; default: the features'")
    parser.add_argument("--workspace-mib", type=int, default=256, help="bound of the tiled losses' temporary memory")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--ring", default="flat", choices=RINGS, help="of the tiled losses")
    parser.add_argument("--ranks-per-node", type=int, default=None, help="two-level ring: as if nodes had so many GPUs")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed, after three; 0: none at all")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="of a setting at most, going by the same loss at the batch before: fewer steps, or none at all",
    )
    parser.add_argument("--open-clip-loss", type=Path, default=None, help="open_clip's loss.py, for its own losses")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of each loss, by their time")
    parser.add_argument("--check", action="store_true", help="errors against float64 instead of times, on one GPU")
    return parser.parse_args()


def _measure_all(rank: int, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    group = None
    if arguments.gpus > 1 or "official" in arguments.impl.split(","):  # its ring is always over WORLD
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        group = dist.group.WORLD if arguments.gpus > 1 else None
    hardware = {"cublas_tflops": library_tflops(), **device_hardware(arguments.commit)}
    if rank == 0:
        print(f"{hardware['device']}, torch {hardware['torch']}, triton {hardware['triton']}, {hardware['commit']}")
        print(f"library 8192^3 bf16: {hardware['cublas_tflops']:.0f} TFLOP/s")
        print(
            f"{'impl':>18} {'batch':>8} {'dim':>4} {'median':>9} {'mean':>9} {'std':>9} {'GPU':>9} ms TFLOP/s ratio MiB"
        )
    for dim in map(int, arguments.dim.split(",")):
        last: dict[str, tuple[int, float]] = {}  # {loss: (previous batch, ms)}
        for batch in map(int, arguments.batch.split(",")):
            for impl in arguments.impl.split(","):
                pairs, ms = last.get(impl, (batch, 0.0))
                steps = affordable(arguments.seconds, ms * (batch / pairs) ** 2, arguments.warm_up, arguments.repeats)
                if steps is None:
                    continue
                row = _measure(impl, batch, dim, group, arguments, *steps)
                last[impl] = (batch, row["median_ms"] or 0.0)  # out of memory: the next one will fail at once
                if rank == 0:
                    _report(row | hardware, arguments.csv)
    if dist.is_initialized():
        dist.destroy_process_group()


def _measure(
    impl: str,
    batch: int,
    dim: int,
    group: dist.ProcessGroup | None,
    arguments: argparse.Namespace,
    compiling: int,
    warm_up: int,
    repeats: int,
) -> dict:
    """Time `repeats` forward and backward passes after warm-up, on the slowest rank; return a row."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank() if group else 0)
    rows = batch // arguments.gpus
    images, texts = (
        F.normalize(torch.randn(rows, dim, device="cuda", generator=generator), dim=1)
        .to(getattr(torch, arguments.dtype))
        .requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(50.0, device="cuda", requires_grad=True)
    bias = torch.tensor(-10.0, device="cuda", requires_grad=True)
    options = {
        "tile_dtype": arguments.tile_dtype,
        "workspace_bytes": arguments.workspace_mib * 2**20,
        "ring": arguments.ring,
        "ranks_per_node": arguments.ranks_per_node,
    }
    loss = make(impl, group, options, arguments.open_clip_loss)

    def step():
        loss(images, texts, scale, bias).backward()
        images.grad = texts.grad = scale.grad = bias.grad = None

    variant = impl
    if impl in TILED and arguments.ring != "flat":
        variant += f" {arguments.ring}/{arguments.ranks_per_node}"
    row = {"impl": variant, "gpus": arguments.gpus, "global_batch": batch, "dim": dim, "dtype": arguments.dtype}
    try:
        for _ in range(compiling):
            step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = timed(step, repeats, group, warm_up=warm_up)
        extra = torch.cuda.max_memory_allocated() - before
        gpu_times = timed(step, repeats, group, warm_up=1, ahead=_AHEAD)
        if arguments.kernels and (group is None or dist.get_rank(group) == 0):
            _print_kernels(step)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"median_ms": None}
    median = statistics.median(times)
    return row | {
        "median_ms": median,
        "mean_ms": statistics.mean(times),
        "std_ms": statistics.stdev(times) if len(times) > 1 else 0.0,
        "repeats": len(times),
        "gpu_ms": statistics.median(gpu_times),
        "tflops_per_gpu": 8 * batch**2 * dim / arguments.gpus / median / 1e9,
        "extra_mib": extra / 2**20,
    }


def _print_kernels(step: Callable[[], None], steps: int = 5, most: int = 12) -> None:
    """Print the GPU's busy time per step, and the `most` longest kernels with their time and number of calls."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.time_range.elapsed_us() / 1000)
    lasted = max(k.time_range.end for k in kernels) - min(k.time_range.start for k in kernels)
    busy = sum(map(sum, by_name.values()))
    print(f"    {busy / steps:.3f} ms in {len(kernels) / steps:.0f} kernels of {lasted / 1000 / steps:.3f} ms per step")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"    {sum(times) / steps:9.3f} ms {len(times) / steps:5.1f} x {name[:100]}", flush=True)


def _check(rank: int, arguments: argparse.Namespace) -> None:
    """Print the precision table and append it to --csv. The official loss needs a process group for its gradient."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for dim in map(int, arguments.dim.split(",")):
        print(f"b = 4096, D = {dim}: errors against float64 of the same features")
        for row in check(4096, dim):
            numbers = "  ".join(f"{key} {value:9.2e}" for key, value in row.items() if isinstance(value, float))
            which = f"{row['features']:>10} {row['impl']:>9} {row['dtype']:>9} {row['tile_dtype']:>5}"
            print(which, numbers, flush=True)
            append(arguments.csv, [row | {"dim": dim} | device_hardware(arguments.commit)])
    dist.destroy_process_group()


def _report(row: dict, path: Path | None) -> None:
    if row["median_ms"] is None:
        print(f"{row['impl']:>18} {row['global_batch']:>8} {row['dim']:>4} out of memory", flush=True)
    else:
        row["ratio_to_cublas"] = row["tflops_per_gpu"] / row["cublas_tflops"]
        times = " ".join(f"{row[name]:9.3f}" for name in ("median_ms", "mean_ms", "std_ms", "gpu_ms"))
        rates = f"{row['tflops_per_gpu']:7.1f} {row['ratio_to_cublas']:5.3f} {row['extra_mib']:6.0f}"
        print(f"{row['impl']:>18} {row['global_batch']:>8} {row['dim']:>4} {times}     {rates}", flush=True)
    append(path, [row], COLUMNS)


if __name__ == "__main__":
    main()
