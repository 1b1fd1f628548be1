"""What tiling costs: `python -m benchmarks.tiling --gpus 4 --batch 262144 --csv ...`; benchmarks.paper draws it.

The same products, five times: bare, by the library; in the tiled loss without a ring (exponentials, sums,
rounding and launches come to it); the ring, waiting for each message; the ring with messages overlapped, by the process
group's sends; the same by copy engines. One GPU has no ring. They take turns: a GPU's clock falls as it warms.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.clock import hardware, require_gpus, timed
from benchmarks.rows import append
from benchmarks.spawn import on_ranks
from infcl import inf_cl_loss
from infcl.kernels import WORKSPACE_BYTES

COLUMNS = (
    "gpus", "global_batch", "dim", "products ms", "products std", "tiles ms", "tiles std", "device", "torch", "triton",
    "commit", "ring, waiting ms", "ring, waiting std", "ring ms", "ring std", "ring, sends ms", "ring, sends std",
    "repeats", "products mean", "tiles mean", "ring, waiting mean", "ring mean", "ring, sends mean",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch", type=int, default=65536, help="global batch")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--csv", type=Path, default=None, help="append a row")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    arguments = parser.parse_args()
    require_gpus("benchmarks.tiling", arguments.gpus)
    on_ranks(_measure, arguments.gpus, arguments)


def _measure(rank: int, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group, rows = dist.group.WORLD, arguments.batch // arguments.gpus
    generator = torch.Generator("cuda").manual_seed(rank)
    features = [
        F.normalize(torch.randn(rows, arguments.dim, device="cuda", generator=generator), dim=1).bfloat16()
        for _ in range(2)
    ]

    def loss(**options):
        images, texts = (x.clone().requires_grad_() for x in features)
        scale = torch.tensor(50.0, device="cuda", requires_grad=True)
        inf_cl_loss(images, texts, scale, cuda_graph=False, **options).backward()

    def alone():
        for _ in range(arguments.gpus):
            with _no_group():
                loss()

    def products():
        for _ in range(arguments.gpus):
            _bare_products(*features)

    steps = {"products": products, "tiles": alone}
    if arguments.gpus > 1:
        steps["ring, waiting"] = lambda: loss(group=group, ring="flat", ring_overlap="off")
        steps["ring, sends"] = lambda: loss(group=group, ring="flat", ring_overlap="sends")
        steps["ring"] = lambda: loss(group=group, ring="flat", ring_overlap="on")
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.repeats):
        for name, step in steps.items():
            turns[name] += timed(step, 1, group, warm_up=0 if turn else 2)
    if rank == 0:
        _report(turns, arguments)
    dist.destroy_process_group()


class _no_group:
    """`inf_cl_loss` of this rank alone refuses to run where there are others; for the time of a call there are none."""

    def __enter__(self):
        self.initialized, dist.is_initialized = dist.is_initialized, lambda: False

    def __exit__(self, *_):
        dist.is_initialized = self.initialized


def _bare_products(rows: Tensor, columns: Tensor) -> None:
    """The four products of one block pair, in chunks of the loss's workspace; nothing is done with the logits."""
    side = int((WORKSPACE_BYTES / 2) ** 0.5) // 256 * 256
    d_rows, d_columns = (torch.zeros_like(x, dtype=torch.float32) for x in (rows, columns))
    chunk = rows.new_empty(side, side)
    for i in range(0, len(rows), side):
        for j in range(0, len(columns), side):
            a, b = rows[i : i + side], columns[j : j + side]
            out = chunk.flatten()[: len(a) * len(b)].view(len(a), len(b))
            for _ in range(2):
                torch.mm(a, b.T, out=out)
            left, right = d_rows[i : i + side], d_columns[j : j + side]
            torch.addmm(left, out, b, out_dtype=torch.float32, out=left)
            torch.addmm(right, out.T, a, out_dtype=torch.float32, out=right)


def _report(turns: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    print(f"{arguments.gpus} GPUs, b = {arguments.batch}, D = {arguments.dim}; ms: median, mean, standard deviation")
    row = {"gpus": arguments.gpus, "global_batch": arguments.batch, "dim": arguments.dim, "repeats": arguments.repeats}
    bare = statistics.median(turns["products"])
    for name, times in turns.items():
        median, mean, deviation = statistics.median(times), statistics.mean(times), statistics.stdev(times)
        print(f"{name:>14} {median:9.2f} {mean:9.2f} {deviation:7.2f}  {median / bare:.3f} of the bare products")
        row |= {f"{name} {what}": round(x, 3) for what, x in (("ms", median), ("mean", mean), ("std", deviation))}
    row |= hardware(arguments.commit)
    append(arguments.csv, [row], COLUMNS)


if __name__ == "__main__":
    main()
