"""Tiles: computation on one pair of feature blocks. No autograd, no communication.

`select_tile` is the only switch between implementations: torch_tile (any device, the reference) and the Triton kernels
(CUDA GPUs). Triton is imported only when its tile is selected, so the package works with torch alone.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from infcl.kernels import torch_tile
from infcl.kernels.tile import Blocks, Gradients, Teacher

TILES = ("auto", "torch", "triton")
TILE_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp64")
WORKSPACE_BYTES = 256 * 2**20

_OPERANDS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class Tile(NamedTuple):
    """The functions of one implementation; torch_tile defines them."""

    operand_dtype: torch.dtype  # dtype of the input features
    tf32: bool  # inputs are float32 rounded to tf32's 11 bits, because a tensor core would truncate them
    softmax_forward: Callable[[Blocks], tuple[Tensor, Tensor]]
    softmax_backward: Callable[[Blocks, Tensor, Tensor | None, Gradients], None]
    sigmoid_gradients: Callable[[Blocks, Tensor, Gradients], tuple[Tensor, Tensor]]
    distill_gradients: Callable[[Blocks, Tensor, Tensor, Teacher, Gradients], Tensor]
    row_dots: Callable[[Tensor, Tensor], Tensor]
    products_of_sums: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def select_tile(features: Tensor, *, tile: str = "auto", tile_dtype: str | None = None) -> Tile:
    """Return the tile for features of this device and dtype.

    Args:
        features: [b, D].
        tile: one of TILES; "auto" is "triton" on a GPU except for fp64, else "torch".
        tile_dtype: precision of the matmuls' operands, one of TILE_DTYPES; sums are float32 (float64 for "fp64"). None
            keeps the features' dtype; float32 then means IEEE float32, without tensor cores on current GPUs.

    Raises:
        ValueError: unknown tile or tile_dtype, or a Triton tile for float64 or for features on another device.
    """
    if tile not in TILES:
        raise ValueError(f"unknown tile '{tile}'; one of {TILES}")
    if tile_dtype is None:
        tile_dtype = next((name for name, dtype in reversed(_OPERANDS.items()) if dtype == features.dtype), None)
    if tile_dtype not in TILE_DTYPES:
        raise ValueError(
            f"features {features.dtype}, tile_dtype {tile_dtype!r}: tile_dtype must be one of {TILE_DTYPES}"
        )
    if tile == "auto":
        tile = "triton" if features.is_cuda and tile_dtype != "fp64" else "torch"
    operand_dtype, tf32 = _OPERANDS[tile_dtype], tile_dtype == "tf32"
    if tile == "torch":
        return Tile(operand_dtype, tf32, *(getattr(torch_tile, name) for name in Tile._fields[2:]))
    if tile_dtype == "fp64":
        raise ValueError("the Triton tile has no float64; use tile='torch'")
    if not features.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"tile 'triton' needs features on a GPU, not on {features.device}: use 'auto' or 'torch'")
    if features.is_cuda and features.get_device() != torch.cuda.current_device():
        raise ValueError(
            f"the features are on {features.device}, and kernels run on the current device, "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device first"
        )
    from infcl.kernels.triton_backward import distill_gradients, sigmoid_gradients, softmax_backward
    from infcl.kernels.triton_forward import softmax_forward
    from infcl.kernels.triton_statistics import products_of_sums, row_dots

    functions = softmax_forward, softmax_backward, sigmoid_gradients, distill_gradients, row_dots, products_of_sums
    return Tile(operand_dtype, tf32, *functions)
