"""Preparation of a tiled loss: read the options, check the features on all ranks, convert them for the tile.

In: the caller's features and scalars. Out: a `Setup` (tile and ring of a call), operands, 0-dim scalars.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import WORKSPACE_BYTES, Tile, select_tile
from infcl.loss.ring import RingExchange, checked_group

LARGEST_SCALE = 1e4  # limit for Python numbers; a hundred times the scale that training uses
_TF32_ROUNDS_BELOW = 2.0**128 - 2.0**116  # larger numbers would round to 2^128, which is inf


@dataclass(frozen=True)
class RingOptions:
    """Options of a tiled loss; every tiled loss accepts these as keywords. Results are the same up to rounding.

    Attributes:
        tile: "triton" (GPU), "torch" (any device), or "auto".
        tile_dtype: precision of the matmuls' operands, "bf16" | "fp16" | "tf32" | "fp32" | "fp64"; None: the features'.
        workspace_bytes: limit of temporary memory, in addition to O(b * D).
        ring: "flat", "two-level" (a ring within each node inside a ring of nodes), or "auto": two-level if the group
            is on several nodes with ranks_per_node ranks each.
        ranks_per_node: number of ranks per node, None if unknown.
        ring_overlap: "on", or "off" to wait for each message right after posting it (to measure the gain of overlap).
        compare_ranks: compare the ranks' shapes, for which the host waits for the GPU. Pass False only if all ranks are
            known to have the same shapes: unequal shapes would hang or mix up rows.
    """

    tile: str = "auto"
    tile_dtype: str | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    ring: str = "auto"
    ranks_per_node: int | None = None
    ring_overlap: str = "on"
    compare_ranks: bool = True


class Setup(NamedTuple):
    """Tile and options of one call. Each autograd pass makes a new ring, whose buffers are freed with it."""

    group: dist.ProcessGroup | None
    tile: Tile
    options: RingOptions

    def of_a_pass(self) -> tuple[RingExchange, Tile, int]:
        """Return ring, tile and workspace_bytes in the argument order of ring_forward and ring_backward."""
        return _ring(self.group, self.options), self.tile, self.options.workspace_bytes

    def operands(self, *features: Tensor) -> list[Tensor]:
        """Return the features as operands of the tile."""
        return [as_operand(one, self.tile) for one in features]


def set_up(
    name: str,
    features: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    options: RingOptions,
    *,
    compared: Mapping[str, int],
    wrong: str = "",
) -> Setup:
    """Check a call on all ranks.

    Args:
        name: name of the loss, for messages.
        features: rows and columns, already checked on this rank.
        group: process group of the ring, or None.
        options: the caller's options.
        compared: {name: number} that must be equal on all ranks.
        wrong: message about this rank's invalid values, or "".

    Raises:
        ValueError: on every rank if ranks differ; on this rank for invalid values or options, or a missing group.
    """
    group = checked_group(group)
    tile = select_tile(features[0], tile=options.tile, tile_dtype=options.tile_dtype)
    ring = _ring(group, options)
    if options.workspace_bytes < 1:
        raise ValueError(f"{name}: workspace_bytes {options.workspace_bytes} must be positive")
    if options.compare_ranks:
        wanted = gradients_wanted(features)
        values: dict[str, int | torch.dtype] = {**compared, "ranks in a lap": ring.lap, "dtype": features[0].dtype}
        values |= {"dtype of products": tile.operand_dtype, "tf32 products": tile.tf32}
        values |= sides_wanted(wanted)
        try:
            ring.require_equal(name, values, features[0].device)
        except ValueError as error:
            raise ValueError(f"{error}; {wrong}" if wrong else str(error)) from None
    if wrong:
        raise ValueError(wrong)
    return Setup(group, tile, options)


def _ring(group: dist.ProcessGroup | None, options: RingOptions) -> RingExchange:
    return RingExchange(group, ring=options.ring, ranks_per_node=options.ranks_per_node, overlap=options.ring_overlap)


def check_features(
    name: str, rows: Tensor, columns: Tensor, what: tuple[str, str] = ("rows", "rows")
) -> dict[str, int]:
    """Return {name: number} that must be equal on all ranks.

    Raises:
        ValueError: not floating point [r, D] and [c, D] of one dtype and device, or r != c where both names are equal.
    """
    shapes = tuple(rows.shape), tuple(columns.shape)
    two_dimensional = rows.ndim == columns.ndim == 2 and 0 not in shapes[0] + shapes[1]
    if not two_dimensional or shapes[0][1] != shapes[1][1] or (what[0] == what[1] and shapes[0] != shapes[1]):
        wanted = "of one shape [b, D]" if what[0] == what[1] else f"[{what[0]}, D] and [{what[1]}, D]"
        raise ValueError(f"{name} needs two sets of features {wanted}, not empty; got {shapes}")
    if rows.dtype != columns.dtype or not rows.is_floating_point():
        raise ValueError(f"{name} needs floating point features of one dtype; got {rows.dtype}, {columns.dtype}")
    if rows.device != columns.device:
        raise ValueError(f"{name} needs features on one device; got {rows.device}, {columns.device}")
    return {what[0]: len(rows), what[1]: len(columns), "feature dimensions": shapes[0][1]}


def gradients_wanted(inputs: Sequence[Tensor]) -> list[bool]:
    """Return for each input whether this rank's backward pass will compute its gradient."""
    return [torch.is_grad_enabled() and x.requires_grad for x in inputs]


def sides_wanted(wanted: Sequence[bool]) -> dict[str, bool]:
    """Return {name: requires_grad} of both sides. Ranks must agree: a side's gradient travels only if wanted."""
    return {f"requires_grad of {side}": one for side, one in zip(("rows", "columns"), wanted)}


def as_operand(features: Tensor, tile: Tile) -> Tensor:
    """Return features in the tile's operand dtype (tf32: rounded to it), contiguous."""
    operand = features.detach().to(tile.operand_dtype).contiguous()
    return rounded_to_tf32(operand) if tile.tf32 else operand


def rounded_to_tf32(features: Tensor) -> Tensor:
    """Return float32 features rounded to tf32's 11 bits, to nearest, ties to even; a new tensor.

    Tensor cores would truncate instead. Truncation reduces every cosine by a relative 7e-4. In the scale's gradient,
    where most terms cancel, the relative error would be 1e-3 to 1e-2. Values that are not finite, or would round to
    inf, stay unchanged.
    """
    bits = features.view(torch.int32)
    rounded = (bits >> 13).bitwise_and_(1).add_(0xFFF).add_(bits).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(features.abs() < _TF32_ROUNDS_BELOW, rounded, features, out=rounded)


def scalar_like(features: Tensor, value: Tensor | float) -> Tensor:
    """Convert a float or one-element tensor to a 0-dim tensor on the features' device, float32 or wider.

    Differentiable. Tensor values are not checked, because the host would wait for the GPU.

    Raises:
        ValueError: not one number; or a Python number that is not finite or above 1e4, such as exp of a scale that is
            not in log space.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    if not isinstance(value, Tensor):
        if not isinstance(value, SupportsFloat):
            raise ValueError(f"logit_scale and logit_bias are a float or a tensor of one element, not {value!r}")
        if not math.isfinite(value) or abs(float(value)) > LARGEST_SCALE:
            raise ValueError(
                f"logit_scale or logit_bias is {float(value):g}: it multiplies cosines (CLIP: exp of the learned "
                f"parameter, at most 100), so a finite number up to {LARGEST_SCALE:g} is expected"
            )
        return torch.full((), float(value), dtype=dtype, device=features.device)
    if value.numel() != 1:
        raise ValueError(
            f"logit_scale and logit_bias are a float or a tensor of one element, not of shape {tuple(value.shape)}"
        )
    return value.reshape(()).to(device=features.device, dtype=dtype)


def outside_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply `torch.compiler.disable` under torch.compile only, because it would import torch._dynamo."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def refuse_double_backward(name: str) -> None:
    """Raise RuntimeError in a backward pass under create_graph=True, where its result would be taken as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} does not support double backward (create_graph=True): it has no second derivative")
