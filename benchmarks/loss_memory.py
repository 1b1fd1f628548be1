"""Memory per row of the tiled losses at millions of rows, on one GPU: `python -m benchmarks.loss_memory`.

Prints a table and appends it to --csv: peak bytes per row above the features, with and without the fixed workspace,
after the forward and after forward and backward.

A call at 8 million rows takes minutes, but its memory does not depend on the results of the tiles. If a case would take
longer than --seconds, only the first tile kernels and matmuls run. The others are skipped, while all allocations
happen as in a complete call. The column "tiles" says which: "all" or "first 4".
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.clock import hardware, require_gpus
from benchmarks.loss_impls import NAMES, OTHERS, make
from benchmarks.rows import append, parser_of_rows
from infcl.kernels import WORKSPACE_BYTES, triton_backward, triton_forward

_FIRST = 4  # launches of each kind that run in a shortened call
_RATE = 4e14  # FLOP/s, to estimate the time of a complete call; a logit costs as much as 300 dimensions at least
COLUMNS = (
    "impl", "direction", "dim", "rows", "bytes_per_row", "bytes_per_row_without_workspace", "peak_gib", "seconds",
    "tiles", "device", "torch", "triton", "commit",
)  # fmt: skip


def main() -> None:
    arguments = _parse()
    require_gpus("benchmarks.loss_memory", 1)
    facts = hardware(arguments.commit)
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, {facts['commit']}")
    print(f"{'loss':>18} {'direction':>18} {'dim':>4} {'rows':>8} bytes/row  without workspace      GiB  seconds tiles")
    for impl, dim, count in itertools.product(arguments.impl, arguments.dim, arguments.rows):
        for backward in (False, True):
            complete = _seconds(count, dim, backward) <= arguments.seconds
            _report(_measure(impl, dim, count, backward, complete) | facts, arguments.csv)


def _parse():
    parser = parser_of_rows(__doc__)

    def listed(kind: Callable) -> Callable:
        return lambda text: [kind(part) for part in text.split(",")]

    names = f"of {', '.join(NAMES)}. " + "; ".join(f"{name}: {what}" for name, what in OTHERS.items())
    parser.add_argument("--impl", type=listed(str), default=["inf_cl"], help=f"comma-separated, {names}")
    parser.add_argument("--dim", type=listed(int), default=[64, 256, 768], help="feature dimensions, comma-separated")
    parser.add_argument("--rows", type=listed(int), default=[2**20, 2**21, 2**22, 2**23], help="comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0, help="a call that takes longer is shortened")
    return parser.parse_args()


def _seconds(rows: int, dim: int, backward: bool) -> float:
    return 2 * rows**2 * (max(dim, 300) + backward * 3 * max(dim, 300)) / _RATE


def _measure(impl: str, dim: int, rows: int, backward: bool, complete: bool) -> dict:
    """Return a row; without memory values if the GPU has too little of it."""
    row = {"impl": impl, "direction": "forward, backward" if backward else "forward", "dim": dim, "rows": rows}
    row |= {"tiles": "all" if complete else f"first {_FIRST}"}
    torch.cuda.empty_cache()
    try:
        images, texts = (_features(rows, dim, seed) for seed in range(2))
        scale, bias = (torch.tensor(value, device="cuda", requires_grad=True) for value in (50.0, -10.0))
        loss = make(impl, None, {}, None)
        small = [_features(1024, dim, seed) for seed in range(2)]
        loss(small[0], small[1], scale, bias).backward()  # compiles; cuBLAS allocates its workspace
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with contextlib.nullcontext() if complete else _first_launches_only():
            value = loss(images, texts, scale, bias)
            if backward:
                value.backward()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return row
    peak = torch.cuda.max_memory_allocated() - before
    return row | {
        "seconds": time.perf_counter() - start,
        "peak_gib": peak / 2**30,
        "bytes_per_row": peak / rows,
        "bytes_per_row_without_workspace": (peak - WORKSPACE_BYTES) / rows,
    }


def _features(rows: int, dim: int, seed: int) -> torch.Tensor:
    """Return normalised BF16 features [rows, dim], made in parts because FP32 ones would need more memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    features = torch.empty(rows, dim, device="cuda", dtype=torch.bfloat16)
    for part in features.split(2**18):
        part.copy_(F.normalize(torch.randn(part.shape, device="cuda", generator=generator), dim=1))
    return features.requires_grad_()


@contextlib.contextmanager
def _first_launches_only() -> Iterator[None]:
    """Skip the tile kernels and matmuls after the first ones. They allocate nothing, so the memory stays the same."""

    def limited(function: Callable) -> Callable:
        calls = itertools.count()
        return lambda *args, **kwargs: function(*args, **kwargs) if next(calls) < _FIRST else None

    class Kernel:
        def __init__(self, kernel):
            self.kernel, self.launch = kernel, limited(lambda grid, *args, **options: kernel[grid](*args, **options))

        def __getitem__(self, grid):
            return lambda *args, **options: self.launch(grid, *args, **options)

    forward, backward = triton_forward, triton_backward
    with contextlib.ExitStack() as stack:
        for module, name in ((forward, "_tile_sums_kernel"), (backward, "_d_logits_kernel")):
            stack.enter_context(mock.patch.object(module, name, Kernel(getattr(module, name))))
        # After skipped tiles many statistics are wrong, which would start the slow repair.
        stack.enter_context(mock.patch.object(forward, "_repair", lambda *args: None))
        stack.enter_context(mock.patch.object(backward, "_add_product", limited(backward._add_product)))
        yield


def _report(row: dict, path) -> None:
    name = f"{row['impl']:>18} {row['direction']:>18} {row['dim']:>4} {row['rows']:>8}"
    if "peak_gib" in row:
        numbers = f"{row['bytes_per_row']:9.1f} {row['bytes_per_row_without_workspace']:18.1f} {row['peak_gib']:8.2f}"
        print(f"{name} {numbers} {row['seconds']:8.1f} {row['tiles']}", flush=True)
    else:
        print(f"{name} out of memory", flush=True)
    append(path, [row], COLUMNS)


if __name__ == "__main__":
    main()
