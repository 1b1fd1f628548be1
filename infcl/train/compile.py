"""Compile the towers: one graph per residual block of a tower.

All blocks of a tower share a graph, so compiling takes seconds. DeepSpeed's hooks, activation checkpointing and
seeding stay outside the graph. Batches of another size than training's (the last one of an evaluation) run eagerly.
Packed captions have a variable number of rows and share one dynamic graph.
"""

import logging
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from infcl.config import RunSpec
from infcl.engine.parameter_groups import ALIGNED
from infcl.engine.patches import FORWARD
from infcl.models.attention import choose_attention
from infcl.models.transformer import compute_block, repeated_blocks
from infcl.parallel import Parallel
from infcl.step.replay import running_statistics

_log = logging.getLogger(__name__)
_RECOMPILE_LIMIT = 64  # graphs: two towers, with and without gradient, each batch size


def prepare_blocks(model: Any, spec: RunSpec, parallel: Parallel) -> bool:
    """Apply --attention and --compile-blocks to a model before an engine wraps it.

    Returns:
        Whether the blocks are compiled.
    """
    choose_attention(model, spec.flags.attention, parallel.device, spec.precision.matmul_dtype)
    if not spec.compiles_blocks:
        return False
    return compile_blocks(model, {spec.batch.micro_batch_size}, packed=spec.packs_captions)


def compile_blocks(model: Any, batch_sizes: Set[int], *, packed: bool = False) -> bool:
    """Compile the residual blocks of both towers. Blocks of the same class and shape share a graph.

    Blocks with BatchNorm run eagerly, since RunningStatistics sets another momentum for each micro-batch.

    Args:
        model: the towers. The function replaces the `run` of our own blocks, the `forward` of open_clip's.
        batch_sizes: samples m of the batches [m, tokens, width] that run compiled (our own blocks).
        packed: captions are packed, with a variable number of rows; padded ones then run eagerly.

    Returns:
        False if nothing is compiled; with a warning if a parameter's size is not a multiple of 8: DeepSpeed's flat
        buffers would then place the next parameter at an address that compiled kernels do not accept.
    """
    own = [block for tower in model.transformers.values() for block in tower.resblocks]
    blocks = own or [block for block in repeated_blocks(model) if not running_statistics(block)]
    parameters = ((f"{type(block).__name__}.{name}", p) for block in blocks for name, p in block.named_parameters())
    if odd := next((name for name, p in parameters if p.numel() % ALIGNED), None):
        _log.warning("the blocks run eagerly: the size of %s is not a multiple of %d", odd, ALIGNED)
        return False
    torch._dynamo.config.recompile_limit = max(_RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    if not own:
        for block in blocks:
            FORWARD.apply(block, lambda forward: torch.compile(forward, dynamic=False))
        return bool(blocks)
    compiled = torch.compile(compute_block, dynamic=False)
    for name, tower in model.transformers.items():
        run = _for_sizes(compiled, compute_block, set() if packed and name == "text" else batch_sizes)
        for block in tower.resblocks:
            block.run = run
    return True


def _for_sizes(compiled: Callable[..., Tensor], eager: Callable[..., Tensor], sizes: Set[int]) -> Callable[..., Tensor]:
    """Return a function that runs `compiled` for batches of `sizes` and for packed captions, else `eager`."""

    def run(x: Tensor, *others: Any, seen: Tensor | None = None) -> Tensor:
        if seen is None:
            return (compiled if len(x) in sizes else eager)(x, *others)
        for tensor in (x, seen):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(x, *others, seen=seen)

    return run
