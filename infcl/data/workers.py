"""Worker processes: torch's DataLoader with what both readers need, and a check of the shared memory that it uses."""

import os
import shutil
from typing import Any

import torch
from torch.utils.data import DataLoader

_SHARED_MEMORY = "/dev/shm"


def make_dataloader(
    dataset: Any, *, num_workers: int, prefetch_factor: int, item_bytes: int, **options: Any
) -> DataLoader:
    """Items of `dataset` as they are, one micro-batch each, in order; pinned where there is a GPU.

    Raises ValueError when this rank's workers alone would overflow shared memory: the workers' tensors lie there until
    they are used, and overflowing it kills a worker with SIGBUS in the middle of a run.
    """
    needed = num_workers * prefetch_factor * item_bytes
    if num_workers and os.path.isdir(_SHARED_MEMORY):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if needed > free:
            raise ValueError(
                f"{num_workers} workers x {prefetch_factor} micro-batches of {item_bytes / 2**20:.0f} MiB need "
                f"{needed / 2**20:.0f} MiB of {_SHARED_MEMORY} for each rank, and {free / 2**20:.0f} MiB are free: "
                f"use fewer --workers, a smaller --batch-size, or more shared memory (docker run --shm-size)"
            )
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that starting an epoch leaves the training's random state alone
        **options,
    )
