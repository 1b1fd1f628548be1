"""Time and memory of the contrastive losses, forward and backward: `python -m benchmarks.loss --gpus 1`.

Every implementation runs on the same features, in one process per GPU. The same run measures the rate of cuBLAS's
8192^3 BF16 GEMM, after a third of a second of GEMMs: a GPU at its power limit is slower.
TFLOP/s counts 8 B^2 D FLOPs for every loss (one pass over the tiles: 1 GEMM forward, 3 backward), divided by the number
of GPUs. Extra memory is the peak above the memory before the call (features), so it includes gradients. GPU ms is the
time without launch delays; a higher median shows the cost of launching kernels.
Prints a table; --csv appends the rows with commit, hardware and versions. --check prints precision instead.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.clock import hardware as device_hardware
from benchmarks.clock import library_tflops, require_gpus, timed, usage_error
from benchmarks.loss_impls import NAMES, OTHERS, make
from benchmarks.processes import on_ranks
from benchmarks.rows import append, parser_of_rows
from infcl.loss.contrastive import TILED
from infcl.loss.links import RINGS

_AHEAD = 15_000_000  # cycles, about 8 ms: longer than the host needs to launch a loss
_ROWS = (  # implementation, dtype of the features, dtype of the tile's operands
    ("inf_cl", torch.bfloat16, None),
    ("inf_cl", torch.float16, None),
    ("inf_cl", torch.float32, "bf16"),
    ("inf_cl", torch.float32, "tf32"),
    ("inf_cl", torch.float32, "fp32"),
    ("clip", torch.bfloat16, None),
    ("clip", torch.float32, None),
    ("official", torch.bfloat16, None),
    ("official", torch.float32, None),
)
_FLOAT16_LOSS_SCALE = 2.0**16
COLUMNS = (
    "impl", "gpus", "global_batch", "dim", "dtype", "median_ms", "mean_ms", "std_ms", "repeats",
    "tflops_per_gpu", "ratio_to_cublas", "extra_mib", "cublas_tflops", "device", "torch", "triton", "commit",
)  # fmt: skip


def main() -> None:
    arguments = _parse()
    if unknown := [impl for impl in arguments.impl.split(",") if impl not in NAMES]:
        usage_error("benchmarks.loss", f"--impl: unknown loss '{unknown[0]}'; one of {', '.join(NAMES)}")
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
    parser.add_argument(
        "--warm-up", type=int, default=2, help="untimed steps, after three that compile; 0: none, for steps of minutes"
    )
    parser.add_argument("--open-clip-loss", type=Path, default=None, help="open_clip's loss.py, for its own losses")
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
        for batch in map(int, arguments.batch.split(",")):
            for impl in arguments.impl.split(","):
                row = _measure(impl, batch, dim, group, arguments)
                if rank == 0:
                    _report(row | hardware, arguments.csv)
    if dist.is_initialized():
        dist.destroy_process_group()


def _measure(impl: str, batch: int, dim: int, group: dist.ProcessGroup | None, arguments: argparse.Namespace) -> dict:
    """Time forward and backward passes after warm-up, on the slowest rank; return a row."""
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
        for _ in range(3 if arguments.warm_up else 0):  # the third call of a loss records a graph
            step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = timed(step, arguments.repeats, group, warm_up=arguments.warm_up)
        extra = torch.cuda.max_memory_allocated() - before
        gpu_times = timed(step, arguments.repeats, group, warm_up=1, ahead=_AHEAD) if arguments.warm_up else times
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


def _report(row: dict, path: Path | None) -> None:
    if row["median_ms"] is None:
        print(f"{row['impl']:>18} {row['global_batch']:>8} {row['dim']:>4} out of memory", flush=True)
    else:
        row["ratio_to_cublas"] = row["tflops_per_gpu"] / row["cublas_tflops"]
        times = " ".join(f"{row[name]:9.3f}" for name in ("median_ms", "mean_ms", "std_ms", "gpu_ms"))
        rates = f"{row['tflops_per_gpu']:7.1f} {row['ratio_to_cublas']:5.3f} {row['extra_mib']:6.0f}"
        print(f"{row['impl']:>18} {row['global_batch']:>8} {row['dim']:>4} {times}     {rates}", flush=True)
    append(path, [row], COLUMNS)


# ---- precision ----


def _check(rank: int, arguments: argparse.Namespace) -> None:
    """Print the precision table and append it to --csv. The official loss needs a process group for its gradient."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for dim in map(int, arguments.dim.split(",")):
        print(f"b = 4096, D = {dim}: errors against float64 of the same features")
        for row in _errors(4096, dim):
            numbers = "  ".join(f"{key} {value:9.2e}" for key, value in row.items() if isinstance(value, float))
            which = f"{row['features']:>10} {row['impl']:>9} {row['dtype']:>9} {row['tile_dtype']:>5}"
            print(which, numbers, flush=True)
            append(arguments.csv, [row | {"dim": dim} | device_hardware(arguments.commit)])
    dist.destroy_process_group()


def _errors(rows: int, dim: int) -> Iterator[dict]:
    """Yield one row per kind of features, implementation and precision, of the installed implementations.

    There are four kinds of features: random unit vectors; pairs as in the middle of a training (scale 100, a loss of
    about 2); separated pairs (a loss of 1e-5); matched pairs of cosine 1. An error is the norm of the difference,
    divided by the norm of the float64 gradient. If that gradient vanishes (1e-36 at a perfect match), the divisor is
    0.1 scale / sqrt(b), a tenth of its size in the first steps of a training, or 1e-2 for the scale's gradient.

    The loss of float16 features is multiplied by 2^16, as loss scaling does in training. Their gradients are float16
    too: an entry of 1e-8, as for separated pairs, would underflow without that factor.
    """
    for kind, scale, images, texts in _kinds(rows, dim):
        for name, dtype, tile_dtype in _ROWS:
            inputs = [x.to("cuda", dtype) for x in (images, texts)]
            reference = _evaluate(make("clip", None, {}, None), [x.double() for x in inputs], scale)
            try:
                loss = make(name, None, {"tile_dtype": tile_dtype} if name == "inf_cl" else {}, None)
                result = _evaluate(loss, inputs, scale)
            except ImportError:  # not installed
                continue
            floor = 0.1 * scale / rows**0.5
            yield {
                "features": kind,
                "impl": name,
                "dtype": str(dtype).removeprefix("torch."),
                "tile_dtype": tile_dtype or "",
                "loss": result[0].item(),
                "loss_error": (result[0].double() - reference[0]).abs().item(),
                "image_gradient_error": _relative(result[1], reference[1], floor),
                "text_gradient_error": _relative(result[2], reference[2], floor),
                "scale_gradient_error": _relative(result[3], reference[3], 1e-2),
            }


def _kinds(rows: int, dim: int) -> Iterator[tuple[str, float, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images, noise = (
        F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    yield "random", 50.0, images, noise
    yield "training", 100.0, images, F.normalize(0.14 * images + noise, dim=1)
    yield "told apart", 100.0, images, F.normalize(0.3 * images + 0.95 * noise, dim=1)
    yield "matched", 100.0, images, images.clone()


def _evaluate(loss, features: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    """Return the loss and its gradients with respect to images, texts and the scale."""
    inputs = [x.clone().requires_grad_() for x in features]
    inputs.append(torch.tensor(scale, device="cuda", dtype=torch.promote_types(features[0].dtype, torch.float32)))
    inputs[-1].requires_grad_()
    value = loss(*inputs, torch.zeros((), device="cuda"))
    factor = _FLOAT16_LOSS_SCALE if features[0].dtype == torch.float16 else 1.0
    gradients = torch.autograd.grad(value * factor, inputs)
    return value.detach(), *(gradient.double() / factor for gradient in gradients)


def _relative(value: Tensor, reference: Tensor, floor: float) -> float:
    size = reference.double().norm().item()
    return (value.double() - reference.double()).norm().item() / (size if size > 1e-9 * floor else floor)


if __name__ == "__main__":
    main()
