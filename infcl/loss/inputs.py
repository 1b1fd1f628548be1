"""What every tiled loss does before its ring: read options, check features on all ranks, convert them for the tile.

In: features and scalars as a caller has them. Out: a `Setup` (tile and ring of a call), operands, 0-dim scalars.
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

LARGEST_SCALE = 1e4  # of a Python number; cosines times this exceed what training uses a hundredfold
_TF32_ROUNDS_BELOW = 2.0**128 - 2.0**116  # from there on to 2^128


@dataclass(frozen=True)
class RingOptions:
    """How a tiled loss is computed; every loss takes these as keywords. Results are the same up to rounding.

    Attributes:
        tile: "triton" (GPU), "torch" (anywhere), or "auto".
        tile_dtype: precision of the matmuls' operands, "bf16" | "fp16" | "tf32" | "fp32" | "fp64"; None: the features'.
        workspace_bytes: bound of the temporary memory next to O(b * D).
        ring: "flat", "two-level" (a ring within each node inside a ring of nodes), or "auto": two-level where the group
            is on several nodes of ranks_per_node ranks each.
        ranks_per_node: number of ranks per node, None if unknown.
        ring_overlap: "on", or "off" to wait for each message where it is sent, which shows what overlap gains.
        compare_ranks: compare the ranks' shapes, for which the host waits for the GPU. False only where all ranks are
            known to have the same shapes: unequal ones would hang or mix up rows.
    """

    tile: str = "auto"
    tile_dtype: str | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    ring: str = "auto"
    ranks_per_node: int | None = None
    ring_overlap: str = "on"
    compare_ranks: bool = True


class Setup(NamedTuple):
    """The tile and the ring of one call; a pass of autograd takes a new ring, whose buffers live as long as it does."""

    group: dist.ProcessGroup | None
    tile: Tile
    options: RingOptions

    def of_a_pass(self) -> tuple[RingExchange, Tile, int]:
        """Return (ring, tile, workspace_bytes), as ring_forward and ring_backward take them."""
        return _ring(self.group, self.options), self.tile, self.options.workspace_bytes

    def operands(self, *features: Tensor) -> list[Tensor]:
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
        name: of the loss, for messages.
        features: of rows and of columns, already checked on this rank.
        compared: {what: number} that all ranks must have alike.
        wrong: what is wrong with this rank's values, or "".

    Raises:
        ValueError: on every rank where ranks differ; on this rank for wrong values, options, or a missing group.
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
    """Return {what: number} that all ranks must have alike.

    ValueError unless these are floats [r, D] and [c, D], with r = c where both are called the same.
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
    """Of each input: whether this rank's backward pass will ask for the gradient."""
    return [torch.is_grad_enabled() and x.requires_grad for x in inputs]


def sides_wanted(wanted: Sequence[bool]) -> dict[str, bool]:
    """{what to call it: whether its gradient is wanted}, to compare: a side's gradient travels, or it does not."""
    return {f"requires_grad of {side}": one for side, one in zip(("rows", "columns"), wanted)}


def as_operand(features: Tensor, tile: Tile) -> Tensor:
    """Features as the tile reads them: its operand type (tf32: rounded to it), contiguous."""
    operand = features.detach().to(tile.operand_dtype).contiguous()
    return rounded_to_tf32(operand) if tile.tf32 else operand


def rounded_to_tf32(features: Tensor) -> Tensor:
    """float32 features with the 11 bits of tf32, rounded to nearest, ties to even; a new tensor.

    Tensor cores would cut the other bits off: every cosine would be smaller, by 7e-4 of it, and the scale's gradient,
    where most of that sum cancels, off by 1e-3 to 1e-2 of it. What is not finite stays, and so does what would become
    so: the last half step below float32's largest number.
    """
    bits = features.view(torch.int32)
    rounded = (bits >> 13).bitwise_and_(1).add_(0xFFF).add_(bits).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(features.abs() < _TF32_ROUNDS_BELOW, rounded, features, out=rounded)


def scalar_like(features: Tensor, value: Tensor | float) -> Tensor:
    """A float or one-element tensor as a 0-dim tensor on the features' device, float32 or wider; differentiable.

    A Python number that is not finite or above 1e4 raises ValueError: the scale is exp of a learned parameter, and
    1.6e6 is what a forgotten log leaves. Tensors are not read, since the host would wait for the GPU.
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
    """`torch.compiler.disable(function)`, which would import torch._dynamo, for callers that are compiled only."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def refuse_double_backward(name: str) -> None:
    """Called in a backward pass: RuntimeError under create_graph=True, where its result would count as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} does not support double backward (create_graph=True): it has no second derivative")
