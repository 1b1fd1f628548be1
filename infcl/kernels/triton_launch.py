"""What launches of the Triton kernels have in common: block shapes by type, operands for descriptors, the GPU."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def launch_options(table: dict[int, dict], features: Tensor, tf32: bool) -> dict:
    """Block shapes, warps, stages and the dot's precision for features of this type, from a kernel's table."""
    return table[features.dtype.itemsize] | {"PRECISION": "tf32" if tf32 else "ieee"}


def aligned(features: Tensor) -> Tensor:
    """Features whose rows start at multiples of 16 bytes, as tensor descriptors need: D padded by zeros, or copied."""
    padding = -features.shape[1] % (16 // features.dtype.itemsize)
    if padding:
        return F.pad(features, (0, padding))
    return features.clone() if features.data_ptr() % 16 else features


def walked_dim(features: Tensor, launch: dict) -> int:
    """D, but at least two BLOCK_K (Triton 3.6 cannot pipeline a loop of one step); past D, descriptors read zeros."""
    return max(features.shape[1], launch["BLOCK_K"] + 1)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
