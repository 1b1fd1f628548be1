"""Measure the memory growth of data workers over many epochs of small shards: `python -m benchmarks.data_memory`.

Prints a line per epoch: samples/s, and the resident memory of each worker (the loader's `worker_memory_mb`). Growth is
measured from the end of epoch --settle, when Python and torch have imported and allocated what they need, to the last
epoch. The exit code is 1 if it is above 5%. --plot draws the graph, --json writes the figures.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.data import JITTER, hardware, write_images
from infcl.data.config import DataConfig
from infcl.data.loader import TrainLoader
from infcl.data.plan import Share
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer

LIMIT = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--settle", type=int, default=4)
    parser.add_argument("--images", type=int, default=1024, help="samples of the set, in four shards")
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory = soak(arguments.epochs, arguments.images, arguments.size, arguments.workers)
    growth = growth_after(memory, arguments.settle)
    print(f"growth from epoch {arguments.settle} to {arguments.epochs}: {100 * growth:+.1f}%")
    result = {**hardware(), **vars(arguments), "growth": round(growth, 4), "worker_mb_after_each_epoch": memory}
    result = {name: str(value) if isinstance(value, Path) else value for name, value in result.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        draw(memory, arguments.plot, result)
    sys.exit(growth > LIMIT)


def soak(epochs: int, images: int, size: int, workers: int) -> list[list[float]]:
    """Return the resident memory of each worker after each epoch, [epochs][workers], in MB."""
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        captions = write_images(Path(folder) / "shards", images, size)
        train_tokenizer(captions, Path(folder) / "x.model", 160)
        loader = TrainLoader(
            DataConfig(f"{folder}/shards", workers=workers, aug=JITTER),
            Tokenizer(Path(folder) / "x.model", 64),
            Share(32, 1, rank=0, world_size=1),
            image_size=min(size, 224),
            seed=0,
        )
        for epoch in range(epochs):
            started = time.perf_counter()
            steps = sum(1 for _ in loader)
            memory.append([round(megabytes, 1) for megabytes in loader.worker_memory_mb()])
            rate = steps * 32 / (time.perf_counter() - started)
            print(f"epoch {epoch + 1:>3}: {rate:6.0f} samples/s, workers {memory[-1]} MB", flush=True)
    return memory


def growth_after(memory: list[list[float]], settle: int) -> float:
    """Return the largest growth of a worker from epoch `settle` to the end, as a fraction."""
    return max(last / first - 1 for first, last in zip(memory[settle - 1], memory[-1]))


def draw(memory: list[list[float]], path: Path, result: dict) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    for worker in range(len(memory[0])):
        axes.plot(range(1, len(memory) + 1), [row[worker] for row in memory], marker=".", label=f"worker {worker}")
    axes.set(xlabel="epoch", ylabel="resident memory [MB]", ylim=(0, 1.3 * max(max(row) for row in memory)))
    axes.set_title(f"{result['images']} samples an epoch, commit {result['commit']}", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
