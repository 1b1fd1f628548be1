"""Shared parts of the Triton launches: block shapes by dtype, operands for tensor descriptors, multiprocessors."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def launch_options(table: dict[int, dict], features: Tensor, tf32: bool) -> dict:
    """Return block shapes, warps, stages and the dot's precision for the features' dtype, from a kernel's table."""
    return table[features.dtype.itemsize] | {"PRECISION": "tf32" if tf32 else "ieee"}


def aligned(features: Tensor) -> Tensor:
    """Align rows to 16 bytes, as tensor descriptors need: pad D with zeros, or copy."""
    padding = -features.shape[1] % (16 // features.dtype.itemsize)
    if padding:
        return F.pad(features, (0, padding))
    return features.clone() if features.data_ptr() % 16 else features


def walked_dim(features: Tensor, launch: dict) -> int:
    """Return D, but more than one BLOCK_K: Triton 3.6 cannot pipeline a loop of one step. Past D, loads give zeros."""
    return max(features.shape[1], launch["BLOCK_K"] + 1)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
