"""Time and memory of exact retrieval ranks, both directions: `python -m benchmarks.retrieval --pairs 1048576 --gpus 1`.

    infcl               retrieval_counts: FP32 tiles, both directions in one pass, over --gpus ranks
    open_clip chunked   open_clip's chunked metrics, which releases up to 3.3 do not have: --open-clip is the path of
                        open_clip_train/metrics.py in a checkout
    open_clip 3.3       the method of 3.3's get_clip_metrics (N x N on the CPU, argsorted), up to --dense-max pairs

Features are random unit vectors with a correlated partner, the same for all. Peak is the memory above the features.
--csv appends the rows with commit, hardware and versions.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.clock import hardware, require_gpus
from benchmarks.loss_impls import peer_module
from benchmarks.processes import on_ranks
from benchmarks.rows import append, parser_of_rows
from infcl.evaluate.retrieval import retrieval_counts

COLUMNS = (
    "impl", "pairs", "dim", "gpus", "tile", "seconds", "tflops_per_rank", "peak_mib",
    "image_to_text_r1", "text_to_image_r1", "device", "torch", "commit",
)  # fmt: skip


def main() -> None:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--pairs", default="16384", help="numbers of pairs, comma-separated")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--gpus", type=int, default=0, help="0: one CPU process")
    parser.add_argument("--tile", type=int, default=4096)
    parser.add_argument("--noise", type=float, default=6.0, help="distance of a text from its image, in units of it")
    parser.add_argument("--open-clip", type=Path, help="open_clip_train/metrics.py of a checkout with chunked metrics")
    parser.add_argument("--dense-max", type=int, default=0, help="also the N x N matrix, up to so many pairs")
    arguments = parser.parse_args()
    require_gpus("benchmarks.retrieval", arguments.gpus)
    on_ranks(_measure_all, max(1, arguments.gpus), arguments)


def _measure_all(rank: int, arguments: argparse.Namespace) -> None:
    device, group = torch.device("cpu"), None
    if arguments.gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if arguments.gpus > 1:
        dist.init_process_group("nccl", device_id=device)
        group = dist.group.WORLD
    for pairs in map(int, arguments.pairs.split(",")):
        images, texts = _features(pairs, arguments.dim, arguments.noise, device)
        for name, function in _implementations(arguments, images, texts, rank, group).items():
            row = _measure(function, pairs, arguments, device)
            if rank == 0:
                _report({"impl": name, "pairs": pairs} | row, arguments)
    if group is not None:
        dist.destroy_process_group()


def _implementations(arguments: argparse.Namespace, images, texts, rank: int, group) -> dict:
    world_size = max(1, arguments.gpus)
    own_images, own_texts = images[rank::world_size].contiguous(), texts[rank::world_size].contiguous()
    owner = torch.arange(len(own_images), device=images.device)

    def ours():
        counts = retrieval_counts(own_images, own_texts, owner, group=group, tile=arguments.tile)
        shares = torch.stack([((1 - c[:, 0]) / (c[:, 1] + 1)).clamp(0, 1).sum() for c in counts]) / len(images)
        if group is not None:
            dist.all_reduce(shares, group=group)
        return shares.tolist()

    found = {"infcl": ours}
    if arguments.open_clip is not None and rank == 0 and world_size == 1:
        metrics = peer_module(arguments.open_clip)

        def chunked():
            result = metrics.get_clip_metrics(
                images, texts, torch.ones((), device=images.device), retrieval_chunk_size=arguments.tile
            )
            return [result["image_to_text_R@1"], result["text_to_image_R@1"]]

        found["open_clip chunked"] = chunked
    if len(images) <= arguments.dense_max and world_size == 1:

        def dense():
            scores = (images @ texts.T).cpu()
            target = torch.arange(len(scores)).view(-1, 1)
            ranks = [torch.where(torch.argsort(s, descending=True) == target)[1] for s in (scores, scores.T)]
            return [(rank < 1).double().mean().item() for rank in ranks]

        found["open_clip 3.3"] = dense
    return found


def _measure(function, pairs: int, arguments: argparse.Namespace, device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    warm = F.normalize(torch.randn(2 * arguments.tile, arguments.dim, device=device), dim=-1)
    retrieval_counts(warm, warm, torch.arange(len(warm), device=device), tile=arguments.tile)
    del warm
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the process's peak memory
    before = torch.cuda.memory_allocated() if on_gpu else _resident("VmRSS")
    started = time.perf_counter()
    recall = function()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    after = torch.cuda.max_memory_allocated() if on_gpu else _resident("VmHWM")
    return {
        "dim": arguments.dim,
        "gpus": arguments.gpus,
        "tile": arguments.tile,
        "seconds": round(seconds, 3),
        "tflops_per_rank": round(2 * pairs**2 * arguments.dim / seconds / 1e12 / max(1, arguments.gpus), 3),
        "peak_mib": round((after - before) / 2**20),
        "image_to_text_r1": round(recall[0], 6),
        "text_to_image_r1": round(recall[1], 6),
    }


def _resident(name: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _features(pairs: int, dim: int, noise: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    images = F.normalize(torch.randn(pairs, dim, generator=generator, device=device), dim=-1)
    texts = torch.randn(pairs, dim, generator=generator, device=device).mul_(noise * dim**-0.5).add_(images)
    return images, F.normalize(texts, dim=-1)


def _report(row: dict, arguments: argparse.Namespace) -> None:
    row |= hardware(arguments.commit) | ({} if arguments.gpus else {"device": "cpu"})
    print("  ".join(f"{name} {row[name]}" for name in COLUMNS if name in row), flush=True)
    append(arguments.csv, [row], COLUMNS)


if __name__ == "__main__":
    main()
