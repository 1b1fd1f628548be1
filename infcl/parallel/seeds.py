"""Seeds of a run and of each micro-batch."""

import os
import random
from typing import Any

import torch


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (all devices). Call this before anything is compiled.

    Args:
        seed: any integer; numpy gets its lowest 32 bits.
        deterministic: make torch raise an error for operations that are not bitwise reproducible. Compiled blocks then
            choose the shapes of their kernels by rule instead of by timing. Unlike torch's default, uninitialised
            memory is not filled: nothing reads it, and filling buckets would take most of a small model's step.
    """
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # read when torch's compiler is imported
        torch.use_deterministic_algorithms(True)
        of_memory: Any = torch.utils.deterministic
        of_memory.fill_uninitialized_memory = False


def micro_batch_seed(seed: int, step: int, micro_batch: int, dp_rank: int) -> int:
    """Return the seed for encoding a micro-batch: equal in both passes, distinct per (step, rank, index)."""
    import numpy as np

    words = np.random.SeedSequence((seed, step, micro_batch, dp_rank)).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])
