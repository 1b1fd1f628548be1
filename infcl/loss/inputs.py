"""Preparation of a loss: read the options, check the inputs on all ranks, convert them for the tile.

In: the caller's features, ids and scalars. Out: a `Setup` (tile, ring and duplicates of a call), 0-dim scalars.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import WORKSPACE_BYTES, Tile, select_tile
from infcl.kernels.tile import Blocks, Groups, Limits
from infcl.loss.duplicates import Duplicates, check_ids, find_duplicates
from infcl.loss.links import global_ranks, lap_length
from infcl.loss.ring import RingExchange, checked_group
from infcl.parallel import require_equal

_ROUNDINGS = 32  # between two sums of the same products in another order
_LARGEST_SCALE = 1e4  # limit for Python numbers; a hundred times the scale that training uses
_TF32_ROUNDS_BELOW = 2.0**128 - 2.0**116  # larger numbers would round to 2^128, which is inf


@dataclass(frozen=True)
class RingOptions:
    """Options of a tiled loss. Results are the same up to rounding.

    Attributes:
        tile: "triton" (GPU), "torch" (any device), or "auto".
        tile_dtype: precision of the matmuls' operands, "bf16" | "fp16" | "tf32" | "fp32" | "fp64"; None: the features'.
        workspace_bytes: limit of temporary memory, in addition to O(b * D).
        ring: "flat", "two-level" (a ring within each node inside a ring of nodes), or "auto": two-level if the group
            is on several nodes with ranks_per_node ranks each.
        ranks_per_node: number of ranks per node, None if unknown.
        compare_ranks: compare the ranks' shapes, for which the host waits for the GPU. Pass False only if all ranks are
            known to have the same shapes: unequal shapes would hang or mix up rows.
    """

    tile: str = "auto"
    tile_dtype: str | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    ring: str = "auto"
    ranks_per_node: int | None = None
    compare_ranks: bool = True


DEFAULT_OPTIONS = RingOptions()


class Setup(NamedTuple):
    """A checked call of a loss: how to compute it, and which entries of the logits are positives and negatives."""

    group: dist.ProcessGroup | None
    tile: Tile
    options: RingOptions
    lap: int  # ranks in a lap of the ring
    needs: tuple[bool, bool]  # whether rows and columns need a gradient
    duplicates: Duplicates | None
    matches: Tensor | None = None  # int64 [r], this rank's column that matches each row; None: row i matches column i
    both: bool = True  # a softmax loss of rows and columns, or of rows only
    margin: float | None = None  # leave out entries whose cosine is above that of the match by more

    def ring(self) -> RingExchange:
        """Return a new ring: each pass has its own, whose buffers are freed with it."""
        return RingExchange(self.group, self.lap)

    def blocks(
        self, rows: Tensor, columns: Tensor, scale: Tensor, hop: int, groups: Groups | None, limits: Limits | None
    ) -> Blocks:
        """Return a tile's input. At hop 0 the columns are this rank's own, which have the matches."""
        masked = hop == 0 and self.matches is None
        return Blocks(rows, columns, scale, masked, self.options.workspace_bytes, groups, limits, self.tile.tf32)

    def travelling(self, cosines: Tensor | None) -> list[Tensor]:
        """Return what travels around the ring with this rank's columns, for `entries`: ids, and limits of columns.

        Args:
            cosines: matched logits / scale, [r]; None without a margin.
        """
        ids = [] if self.duplicates is None else [self.duplicates.columns]
        return ids + ([limits_of(cosines, self.margin)] if self.margin is not None and self.both else [])

    def entries(
        self, block: Tensor, its: Sequence[Tensor], cosines: Tensor | None, weights: Tensor | None = None
    ) -> tuple[Groups | None, Limits | None]:
        """Return the entries of a block of columns that are no plain negatives.

        Args:
            block: the columns [c, D].
            its: what travelled with the block.
            cosines: matched logits / scale of the own rows, [r]; None without a margin.
            weights: see Groups.
        """
        groups = limits = None
        if self.duplicates is not None:
            (ids, *its) = its
            groups = self.duplicates.groups(ids, weights)
        if self.margin is not None:
            own = limits_of(cosines, self.margin)
            limits = Limits(own, its[0] if self.both else own.new_full((len(block),), math.inf))
        return groups, limits

    def operands(self, *features: Tensor) -> list[Tensor]:
        """Return the features as operands of the tile."""
        return [as_operand(one, self.tile) for one in features]


def limits_of(cosines: Tensor | None, margin: float) -> Tensor:
    """Return the largest cosines that count, from those of the matches; equal ones up to rounding count."""
    assert cosines is not None, "a margin is relative to the matches"
    rounding = _ROUNDINGS * torch.finfo(cosines.dtype).eps * cosines.abs().clamp(min=1)
    return cosines + margin + rounding


def set_up(
    name: str,
    rows: Tensor,
    columns: Tensor,
    group: dist.ProcessGroup | None,
    options: RingOptions,
    *,
    sizes: tuple[str, str] = ("rows", "rows"),
    ids: Tensor | None = None,
    ids_name: str = "ids",
    duplicates: str = "negative",
    matches: Tensor | None = None,
    both: bool = True,
    margin: float | None = None,
    invalid: str = "",
) -> Setup:
    """Check a call on all ranks.

    Args:
        rows, columns: features of this rank, [r, D] and [c, D].
        sizes: names of r and c; r and c must be equal if the names are.
        ids, ids_name: int64 [c] or None, see loss/duplicates; and the argument's name.
        duplicates: role of entries with an equal id.
        matches, both, margin: as in Setup.
        invalid: message about this rank's invalid values, or "".

    Raises:
        ValueError: on every rank if ranks differ; on this rank for invalid inputs or options, or a missing group.
    """
    compared = _check_features(name, rows, columns, sizes) | check_ids(name, len(columns), ids, ids_name, duplicates)
    if margin is not None and not -2 <= margin <= 2:
        raise ValueError(f"{name}: margin {margin} is a difference of two cosines, between -2 and 2")
    group = checked_group(group)
    tile = select_tile(rows, tile=options.tile, tile_dtype=options.tile_dtype)
    if options.workspace_bytes < 1:
        raise ValueError(f"{name}: workspace_bytes {options.workspace_bytes} must be positive")
    # Ranks must agree on requires_grad: a side's gradient travels only if it is needed.
    needs = (torch.is_grad_enabled() and rows.requires_grad, torch.is_grad_enabled() and columns.requires_grad)
    lap = lap_length(global_ranks(group), ring=options.ring, ranks_per_node=options.ranks_per_node)
    setup = Setup(group, tile, options, lap, needs, None, matches, both, margin)
    if options.compare_ranks:
        compared |= {"ranks in a lap": lap, "dtype": rows.dtype, "dtype of products": tile.operand_dtype}
        compared |= {"tf32 products": tile.tf32, "validity of inputs": not invalid}
        compared["margin (millionths)"] = -1 if margin is None else round((margin + 2) * 1e6)
        compared |= {"requires_grad of rows": needs[0], "requires_grad of columns": needs[1]}
        try:
            require_equal(group, name, compared, rows.device)
        except ValueError as error:
            raise ValueError(f"{error}; {invalid}" if invalid else str(error)) from None
    if invalid:
        raise ValueError(invalid)
    if ids is None or duplicates == "negative":
        return setup
    ids = ids.to(rows.device).contiguous()
    row_ids = ids[: len(rows)] if matches is None else ids[matches]
    return setup._replace(duplicates=find_duplicates(row_ids, ids, duplicates))


def _check_features(name: str, rows: Tensor, columns: Tensor, sizes: tuple[str, str]) -> dict[str, int | torch.dtype]:
    """Return {name: number} that must be equal on all ranks. Raise ValueError for a wrong shape, dtype or device."""
    shapes = tuple(rows.shape), tuple(columns.shape)
    one_shape = sizes[0] == sizes[1]
    two_dimensional = rows.ndim == columns.ndim == 2 and 0 not in shapes[0] + shapes[1]
    if not two_dimensional or shapes[0][1] != shapes[1][1] or (one_shape and shapes[0] != shapes[1]):
        wanted = "of one shape [b, D]" if one_shape else f"[{sizes[0]}, D] and [{sizes[1]}, D]"
        raise ValueError(f"{name} needs two sets of features {wanted}, not empty; got {shapes}")
    if rows.dtype != columns.dtype or not rows.is_floating_point():
        raise ValueError(f"{name} needs floating point features of one dtype; got {rows.dtype}, {columns.dtype}")
    if rows.device != columns.device:
        raise ValueError(f"{name} needs features on one device; got {rows.device}, {columns.device}")
    return {sizes[0]: len(rows), sizes[1]: len(columns), "feature dimensions": shapes[0][1]}


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


def scalar_like(features: Tensor, value: Tensor | float, name: str = "logit_scale") -> Tensor:
    """Convert a float or one-element tensor to a 0-dim tensor on the features' device, float32 or wider.

    Differentiable. Tensor values are not checked, because the host would wait for the GPU.

    Raises:
        ValueError: a tensor of several elements; or a Python number that is not finite or above 1e4, such as exp of a
            scale that is not in log space.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    if not isinstance(value, Tensor):
        if not abs(float(value)) <= _LARGEST_SCALE:  # NaN too
            raise ValueError(
                f"{name} is {float(value):g}: a finite number up to {_LARGEST_SCALE:g} is expected (CLIP's factor of "
                "the cosines is exp of the learned parameter, at most 100)"
            )
        return torch.full((), float(value), dtype=dtype, device=features.device)
    if value.numel() != 1:
        raise ValueError(f"{name} is a float or a tensor of one element, not of shape {tuple(value.shape)}")
    return value.reshape(()).to(device=features.device, dtype=dtype)


def outside_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply `torch.compiler.disable` under torch.compile only, because it would import torch._dynamo."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def reject_double_backward(name: str) -> None:
    """Raise RuntimeError in a backward pass under create_graph=True, where its result would be taken as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} does not support double backward (create_graph=True): it has no second derivative")
