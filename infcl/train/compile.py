"""torch.compile for the towers, one residual block at a time, with a way back to eager.

In:  a CLIP model that no engine holds yet. Out: the same modules, whose blocks' `forward` runs a compiled graph; on a
     GPU what comes before the image tower's blocks does too (compiled_embedding.py).

One block is one graph, and all blocks of a tower share it: compiling takes seconds, not minutes. What surrounds a block
stays outside: DeepSpeed's hooks (ZeRO-3 gathers a whole block at once, engine.py), activation checkpointing, the seeds.
Where nothing of that comes between blocks, tensor-parallel ones are compiled in runs (megatron_patches/halves.py).

The graph is made for the batch sizes of training. Other batches (the last one of an evaluation) run eagerly instead of
compiling again; packed captions, which come in any number of rows, have a graph for many numbers (the compiler may tell
large ones from small). Each tower's graphs are made and run once at start, on a copy of a block, forward and backward,
beside the eager block: what cannot be compiled, or computes something else, is told then, with its cause, and
everything stays eager, on all ranks.
"""

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.config.preset import read_preset, zero_stage
from infcl.engine.optim import ALIGNED
from infcl.models.attention import choose_attention
from infcl.models.captions import packs_captions
from infcl.models.clip import CLIP
from infcl.models.config import VisionConfig, kept_patches
from infcl.models.fused_embedding import CompiledEmbedding
from infcl.models.packing import caption_spans, row_length
from infcl.models.self_test import cause_of, require_near
from infcl.models.transformer import ResidualBlock
from infcl.parallel import Parallel, max_over

_log = logging.getLogger(__name__)
_RECOMPILE_LIMIT = 64  # variants: two towers, with and without gradient, each batch size
BLOCKS_OF_A_RUN = 4  # at most, a divisor of the tower's
# What compiled blocks may differ from eager ones, of a tensor's norm. Rounding is a tenth of it; it is there for
# garbage, which torch 2.11 has made on GPUs (docs/log.md).
APART = {torch.float32: 0.02, torch.bfloat16: 0.2, torch.float16: 0.2}
_OTHER = "compiled code computes something else than eager code"
Way = tuple[Callable, dict[str, Any] | None]  # (forward of some blocks, options of torch.compile)


@dataclass(frozen=True)
class Inputs:
    """What the blocks of a tower will see: [m, tokens, w], and with packed captions who sees whom."""

    tokens: int
    dtype: torch.dtype
    batch_sizes: frozenset[int]  # m, or, of packed captions, two of many
    masks: int = 0  # rows of packed captions for each of m: 1, under sequence parallelism those of T ranks
    spans: bool = False  # in the place of those rows' masks (packing.caption_spans)


PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of other precisions: float32


def prepare_blocks(model: CLIP, config: TrainConfig, parallel: Parallel, precision: str, batch: BatchPlan) -> bool:
    """What --attention and --compile-blocks say, for the batch sizes that the two passes of a step have.

    True: blocks are compiled. ValueError for --attention triton where no tower can have it.
    """
    choose_attention(model, config.attention, parallel.device, compute_dtype(precision))
    auto = config.compile_blocks == "auto" and parallel.device.type == "cuda"
    wanted = auto or config.compile_blocks == "on"
    groups = {min(config.encode_micro_batches, batch.num_micro_batches), 1}
    share = parallel.tp_size if config.sequence_parallel else 1  # a block then sees its rank's samples only
    sizes = {-(-n * batch.micro_batch_size // share) for n in groups}
    alone = zero_stage(read_preset(config, parallel.device.type)[0]) == 3 or config.grad_checkpointing
    alone = alone or config.lock_image or config.lock_text or parallel.tp_size == 1
    run = 1 if alone else BLOCKS_OF_A_RUN
    way = way_to_compile(parallel, config.sequence_parallel)
    packed = packs_captions(config, model.cfg)
    # Tensor-parallel ranks must sum gradients alike; of some kernels the compiler takes what is fastest on each.
    embed = parallel.device.type == "cuda" and parallel.tp_size == 1
    ways: dict[str, Any] = {"way": way, "blocks_of_a_run": run, "masks": share * packed, "embed": embed}
    return wanted and compile_blocks(model, parallel.device, precision, sizes, **ways)


def compute_dtype(precision: str) -> torch.dtype:
    """Of the towers' products."""
    return torch.bfloat16 if precision == "amp_bf16" else PARAMETER_DTYPES.get(precision, torch.float32)


def way_to_compile(parallel: Parallel, sequence_parallel: bool) -> Way | None:
    """Tensor-parallel blocks send while they compute, and the compiler has to keep their order."""
    if parallel.tp_size == 1:
        return None
    from megatron_patches.halves import IN_HALVES, LATE_WAITS

    return (_in_turn, LATE_WAITS) if sequence_parallel else IN_HALVES


def compile_blocks(
    model: CLIP,
    device: torch.device,
    precision: str,
    batch_sizes: set[int],
    *,
    way: Way | None = None,
    blocks_of_a_run: int = 1,
    masks: int = 0,
    embed: bool = False,
) -> bool:
    """Compile the blocks of both towers for `batch_sizes`. False when that failed: then nothing has changed.

    way: the blocks' forward, and torch.compile's options for it; one after the other, and none, when it is None.
    blocks_of_a_run: so many blocks, or a divisor of that, are one graph, which is the forward of the first of them.
    masks: texts come packed, in any number of rows, with masks or spans of so many rows for each; 0: whole.
    embed: compile what comes before the image tower's blocks too (compiled_embedding.py).
    """
    torch._dynamo.config.recompile_limit = max(_RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    if odd := [n for n, p in model.named_parameters() if ".resblocks." in n and p.numel() % ALIGNED]:
        _log.warning("the towers' blocks run eagerly: the size of %s is no multiple of %d", odd[0], ALIGNED)
        return False
    forward, options = way or (_in_turn, None)
    compiled = torch.compile(forward, dynamic=False, options=options)
    towers = [
        _runs(tower.resblocks, math.gcd(len(tower.resblocks), blocks_of_a_run))
        for tower in (model.visual.transformer, model.transformer)
    ]
    inputs = _inputs(model, precision, frozenset(batch_sizes), masks)
    runners = [partial(_run, forward, compiled, one) for one in inputs]
    embedding = CompiledEmbedding(frozenset(batch_sizes)) if embed else None
    failed = False
    try:
        if embedding is not None:
            trained = model.visual.class_embedding.requires_grad
            _try_embedding(embedding, model.cfg.vision_cfg, device, precision, trained=trained)
        for (blocks, *_), runner, one in zip(towers, runners, inputs):
            _try(blocks, runner, forward, one, device, precision)
    except Exception as error:  # compilers raise many types; whatever it is, eager blocks need none of it
        _log.warning("the towers' blocks run eagerly, torch.compile failed: %s", cause_of(error))
        failed = True
    if dist.is_initialized() and max_over(dist.group.WORLD, [failed], device)[0]:
        if not failed:
            _log.warning("the towers' blocks run eagerly, since torch.compile failed on another rank")
        return False  # tensor-parallel blocks send other messages when they are compiled
    if failed:
        return False
    if embedding is not None:
        embedding.install(model.visual)
    for runs, runner in zip(towers, runners):
        for block in itertools.chain(*runs):
            block.forward = _computed_by_the_first  # hooks stay around it
        for blocks in runs:
            blocks[0].forward = partial(runner, blocks)
    return True


def _runs(blocks: nn.ModuleList, length: int) -> list[nn.ModuleList]:
    return [blocks[begin : begin + length] for begin in range(0, len(blocks), length)]


def _run(
    forward: Callable, compiled: Callable, inputs: Inputs, blocks: nn.ModuleList, x: torch.Tensor, *seen: torch.Tensor
) -> torch.Tensor:
    if not seen:  # of the text tower of a run that packs its captions, whole ones have no graph
        return (compiled if len(x) in inputs.batch_sizes and not inputs.masks else forward)(blocks, x)
    for tensor in (x, *seen):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(blocks, x, *seen)


def _in_turn(blocks: Iterable[Any], x: torch.Tensor, *seen: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = ResidualBlock.forward(block, x, *seen)
    return x


def _computed_by_the_first(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x


def _inputs(model: CLIP, precision: str, batch_sizes: frozenset[int], masks: int) -> list[Inputs]:
    """Of the image tower and the text tower."""
    vision = model.cfg.vision_cfg
    tokens = 1 + kept_patches(vision.num_patches, vision.patch_dropout)
    dtype = PARAMETER_DTYPES.get(precision, torch.float32)
    image_dtype = torch.bfloat16 if precision == "amp_bf16" else dtype  # the first convolution's; texts start in fp32
    images = Inputs(tokens, image_dtype, batch_sizes)
    if not masks:
        return [images, Inputs(model.context_length, dtype, batch_sizes)]
    rows = {max(2, -(-size // share)) for size in batch_sizes for share in (2, 4)}  # of whole captions, and of shorter
    spans = model.caption_places is caption_spans
    return [images, Inputs(row_length(model.context_length), dtype, frozenset(rows), masks, spans)]


def _try(
    blocks: nn.ModuleList,
    run: Callable,
    eager: Callable,
    inputs: Inputs,
    device: torch.device,
    precision: str,
) -> None:
    """Compile and run a copy of `blocks` as training will: without gradients, and (the smallest batch) with them.

    SomethingElse where `run` is not what `eager` is.
    """
    blocks = copy.deepcopy(blocks).to(device, PARAMETER_DTYPES.get(precision, torch.float32))
    trained = {name: parameter for name, parameter in blocks.named_parameters() if parameter.requires_grad}
    first: Any = blocks[0]
    width = first.attn.out_proj.in_features
    apart = APART[torch.bfloat16 if precision == "amp_bf16" else inputs.dtype]
    generator = torch.Generator(device).manual_seed(0)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "amp_bf16"):
        for size in sorted(inputs.batch_sizes):
            x = torch.randn(size, inputs.tokens, width, generator=generator, device=device).to(inputs.dtype)
            given = [x]
            if inputs.masks:
                given.append(_two_a_row(inputs, inputs.masks * size, device))
            with torch.no_grad():
                require_near({"output": run(blocks, *given)}, {"output": eager(blocks, *given)}, apart, _OTHER)
            if trained and size == min(inputs.batch_sizes):
                found, expected = (_gradients(forward, blocks, trained, *given) for forward in (run, eager))
                require_near(found, expected, apart, _OTHER)


def _two_a_row(inputs: Inputs, rows: int, device: torch.device) -> torch.Tensor:
    """Spans of captions that fill half a row each, or the mask of whole rows."""
    if inputs.spans:
        half = inputs.tokens // 2
        begins = torch.arange(2 * rows, device=device) * half
        return torch.stack([begins, torch.full_like(begins, half)], dim=1)
    return torch.ones(rows, 1, inputs.tokens, inputs.tokens, dtype=torch.bool, device=device).tril()


def _try_embedding(
    embedding: CompiledEmbedding, cfg: VisionConfig, device: torch.device, precision: str, *, trained: bool = True
) -> None:
    """Run its functions as `_try` runs blocks. SomethingElse where one is not what the eager one is."""
    dtype = PARAMETER_DTYPES.get(precision, torch.float32)
    apart = APART[torch.bfloat16 if precision == "amp_bf16" else dtype]
    tokens = 1 + (kept_patches(cfg.num_patches, cfg.patch_dropout) if trained else cfg.num_patches)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "amp_bf16"):
        for size in sorted(embedding.sizes):
            for name, (run, eager, given) in embedding.trials(cfg, size, tokens, device, dtype, trained=trained):
                with torch.no_grad():
                    require_near({name: run(*given)}, {name: eager(*given)}, apart, _OTHER)
                if size > min(embedding.sizes):
                    continue
                found, expected = ({name: way(*given)} for way in (run, eager))
                inputs = {f"{name}, {place}": x for place, x in enumerate(given) if getattr(x, "requires_grad", False)}
                if inputs:
                    found, expected = (_of_weighted_sum(one[name], inputs) for one in (found, expected))
                require_near(found, expected, apart, _OTHER)


def _gradients(
    forward: Callable, blocks, trained: dict[str, nn.Parameter], x: torch.Tensor, *seen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """{parameter, "input": gradient} of a weighted sum of the blocks' outputs."""
    x = x.clone().requires_grad_()
    return _of_weighted_sum(forward(blocks, x, *seen), {"input": x} | trained)


def _of_weighted_sum(y: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(1), device=y.device)
    return dict(zip(inputs, torch.autograd.grad((y * weights).sum(), list(inputs.values()))))
