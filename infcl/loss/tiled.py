"""A tiled loss as one step of autograd: in an eager caller, and in one that torch.compile compiles.

In: the maths of a loss as plain functions of tensors (`Maths`), and how a call wants them computed (`Options`). Out:
the loss, 0-dim, differentiable once.

Compiled, a loss is two operators that no compiler looks into, infcl::tiled_loss and infcl::tiled_loss_backward (with
"_that_waits" where a CUDA graph cannot hold them): a graph goes through it. Their kernels are compiled already; between
them are messages, which ranks issue in one order since they compile one program, as with torch's own functional
collectives. A group is known there by its name.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels import Tile, select_tile
from infcl.kernels.operators import operator
from infcl.loss.operands import as_operand, gradients_wanted, named_wishes, refuse_double_backward, scalar_like
from infcl.loss.ring import RingExchange, ring_maker

Comparable = dict[str, int | torch.dtype]


class Options(NamedTuple):
    """How a call wants its loss computed; `inf_cl_loss` says what each means."""

    group: Any  # a ProcessGroup or None; in an operator its name
    tile: str
    tile_dtype: str | None
    workspace_bytes: int
    ring: str
    ranks_per_node: int | None
    ring_overlap: str
    compare_ranks: bool


class Means(NamedTuple):
    """What a pass computes with: a ring of its own, the tile, and the bytes of temporary memory."""

    new_ring: Callable[[], RingExchange]
    tile: Tile
    workspace_bytes: int

    def of_a_pass(self) -> tuple[RingExchange, Tile, int]:
        return self.new_ring(), self.tile, self.workspace_bytes

    def operands(self, *features: Tensor) -> Iterator[Tensor]:
        return (as_operand(one, self.tile) for one in features)


class Maths(NamedTuple):
    """A loss. Inputs: features (or views, or queries), then what else is a tensor; statistics: what backward needs of
    forward, of shapes that follow from the inputs'.

    check(*features) -> (numbers that all ranks must have alike, what is wrong with this rank's values or "").
        ValueError for features that cannot be, whatever other ranks have.
    forward(means, *inputs) -> (loss, statistics).
    backward(means, d_loss, inputs, statistics, needs) -> gradients, of which those that are not needed may be None.
    statistics(*inputs) -> shapes and dtypes of the statistics; a dtype of None is that of the sums.
    waits: whether the host waits for the GPU, by one rank alone too.
    reach(world_size) -> how many hops a block makes; None: all of them.
    """

    name: str
    check: Callable[..., tuple[Comparable, str]]
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    statistics: Callable[..., list[tuple[Sequence[int], torch.dtype | None]]]
    reach: Callable[[int], int] | None = None
    waits: bool = False


_losses: dict[str, Maths] = {}  # by the name under which the operators find them


def register(maths: Maths) -> Maths:
    _losses[maths.name] = maths
    return maths


def loss(
    maths: Maths,
    options: Options,
    features: Sequence[Tensor],
    scalars: Sequence[Tensor | float],
    eager: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The loss, differentiable once. features: tensors of rows, those with a gradient first. scalars: scale, bias.

    eager(means, *inputs): computes it in a caller that is not compiled, where that is not autograd's usual way.
    Raises ValueError, on every rank where ranks differ; in a compiled caller when the graph runs.
    """
    wanted = gradients_wanted(features)
    if torch.compiler.is_compiling():
        group = None if options.group is None else options.group.group_name
        inputs = [*features, *(scalar_like(features[0], scalar) for scalar in scalars)]
        chosen = _waiting if maths.waits or group is not None else _capturable
        return chosen(maths.name, inputs, wanted, *options._replace(group=group))[0]
    means = _checked(maths, options, features, wanted)
    inputs = [*features, *(scalar_like(features[0], scalar) for scalar in scalars)]
    return differentiable(maths, means, *inputs) if eager is None else eager(means, *inputs)


def differentiable(maths: Maths, means: Means, *inputs: Tensor) -> Tensor:
    """The loss of inputs that were checked, by autograd in an eager caller."""
    return _Tiled.apply(maths, means, *inputs)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maths, means, *inputs):
        with torch.autocast(inputs[0].device.type, enabled=False):
            loss, statistics = maths.forward(means, *inputs)
        ctx.save_for_backward(*inputs, *statistics)
        ctx.maths, ctx.means, ctx.count = maths, means, len(inputs)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        refuse_double_backward(ctx.maths.name)
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint gives them once, save_on_cpu copies them each time
        inputs, statistics = saved[: ctx.count], saved[ctx.count :]
        with torch.autocast(inputs[0].device.type, enabled=False):
            gradients = ctx.maths.backward(ctx.means, d_loss, inputs, statistics, ctx.needs_input_grad[2:])
        return None, None, *gradients


def _checked(maths: Maths, options: Options, features: Sequence[Tensor], wanted: Sequence[bool]) -> Means:
    """Of features and no other inputs."""
    new_ring = _new_ring(maths, options)
    compared, wrong = maths.check(*features)
    tile = _tile(options, features[0])
    if options.workspace_bytes < 1:
        raise ValueError(f"{maths.name}: workspace_bytes {options.workspace_bytes} must be positive")
    if options.compare_ranks:
        ring = new_ring()
        compared |= {"ranks in a lap": ring.lap, "dtype": features[0].dtype, "dtype of products": tile.operand_dtype}
        compared |= {"tf32 products": tile.tf32} | named_wishes(wanted)
        try:
            ring.require_equal(maths.name, compared, features[0].device)
        except ValueError as error:
            raise ValueError(f"{error}; {wrong}" if wrong else str(error)) from None
    if wrong:
        raise ValueError(wrong)
    return Means(new_ring, tile, options.workspace_bytes)


def _new_ring(maths: Maths, options: Options) -> Callable[[], RingExchange]:
    group: Any = options.group
    if isinstance(group, str):
        by_name: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
        group = by_name(group)
    reach = None if maths.reach is None else maths.reach(1 if group is None else dist.get_world_size(group))
    links = {"ring": options.ring, "ranks_per_node": options.ranks_per_node}
    return ring_maker(group, **links, overlap=options.ring_overlap, reach=reach)


def _tile(options: Options, features: Tensor) -> Tile:
    return select_tile(features, tile=options.tile, tile_dtype=options.tile_dtype)


# ---- as operators of torch ----


def _tiled_loss(name: str, inputs: list[Tensor], wanted: list[bool], *options) -> list[Tensor]:
    maths = _losses[name]
    means = _checked(maths, Options(*options), inputs[: len(wanted)], wanted)
    with torch.autocast(inputs[0].device.type, enabled=False):
        loss, statistics = maths.forward(means, *inputs)
    return [_own(result) for result in (loss, *statistics)]


def _tiled_loss_backward(
    name: str, d_loss: Tensor, inputs: list[Tensor], statistics: list[Tensor], needs: list[bool], *arguments
) -> list[Tensor]:
    maths, options = _losses[name], Options(*arguments)
    means = Means(_new_ring(maths, options), _tile(options, inputs[0]), options.workspace_bytes)
    with torch.autocast(inputs[0].device.type, enabled=False):
        gradients = maths.backward(means, d_loss, inputs, statistics, needs)
    return [_needed(gradient, x.dtype) for gradient, x, need in zip(gradients, inputs, needs) if need]


def _needed(gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert gradient is not None, "only a gradient that is not needed may be left out"
    return _own(gradient.to(dtype))


def _own(result: Tensor) -> Tensor:
    """What an operator returns shares memory with nothing."""
    return result if result.nbytes == result.untyped_storage().nbytes() else result.clone()


def _fake_loss(name, inputs, wanted, *options):
    options, features = Options(*options), inputs[0]
    wide = torch.float64 if options.tile_dtype == "fp64" else torch.float32
    if options.tile_dtype is None:
        wide = torch.promote_types(features.dtype, torch.float32)
    shapes = [((), None), *_losses[name].statistics(*inputs)]
    return [features.new_empty(shape, dtype=wide if dtype is None else dtype) for shape, dtype in shapes]


def _fake_backward(name, d_loss, inputs, statistics, needs, *options):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in zip(inputs, needs) if need]


def _keep(ctx, inputs, output):
    name, tensors, _, *ctx.options = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.name, ctx.count, ctx.needs = name, len(tensors), [x.requires_grad for x in tensors]


def _gradients(backward: Callable, ctx, d_outputs: list[Tensor]):
    saved = list(ctx.saved_tensors)
    inputs, statistics = saved[: ctx.count], saved[ctx.count :]
    needed = iter(backward(ctx.name, d_outputs[0], inputs, statistics, ctx.needs, *ctx.options))
    return None, [next(needed) if need else None for need in ctx.needs], None, *[None] * len(ctx.options)


def _no_second_derivative(ctx, *_):
    raise RuntimeError(
        "infcl's losses do not support double backward (create_graph=True): they have no second derivative"
    )


_OPTIONS = (
    "str? group, str tile, str? tile_dtype, int workspace_bytes, str ring, int? ranks_per_node, str ring_overlap, "
    "bool compare_ranks"
)
_FORWARD = f"(str loss, Tensor[] inputs, bool[] wanted, {_OPTIONS}) -> Tensor[]"
_BACKWARD = f"(str loss, Tensor d_loss, Tensor[] inputs, Tensor[] statistics, bool[] needs, {_OPTIONS}) -> Tensor[]"


def _operators(name: str, tags: Sequence[torch.Tag] = ()) -> Callable:
    backward = operator(_tiled_loss_backward, _BACKWARD, _fake_backward, name=f"{name}_backward", tags=tags)
    torch.library.register_autograd(f"infcl::{name}_backward", _no_second_derivative)
    forward = operator(_tiled_loss, _FORWARD, _fake_loss, name=name, tags=tags)
    torch.library.register_autograd(f"infcl::{name}", partial(_gradients, backward), setup_context=_keep)
    return forward


_capturable = _operators("tiled_loss")
# The host waits for the GPU, or for other ranks: in no CUDA graph (mode="reduce-overhead").
_waiting = _operators("tiled_loss_that_waits", [torch.Tag.cudagraph_unsafe])
