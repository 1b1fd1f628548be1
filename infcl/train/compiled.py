"""torch.compile for the towers, one residual block at a time, with a way back to eager.

In:  a CLIP model that no engine holds yet. Out: the same modules, whose blocks' `forward` runs a compiled graph.

One block is one graph, and all blocks of a tower share it: compiling takes seconds, not minutes. What surrounds a block
stays outside: DeepSpeed's hooks (ZeRO-3 gathers a whole block at once, engine.py), activation checkpointing, the seeds.

The graph is made for the batch sizes of training. Other batches (the last one of an evaluation) run eagerly instead of
compiling again. Each tower's graphs are made and run once at start, on a copy of a block, forward and backward: what
cannot be compiled is told then, with its cause, and everything stays eager.
"""

import copy
import logging
from functools import partial
from typing import Any

import torch

from infcl.config import BatchPlan, TrainConfig
from infcl.parallel import Parallel
from infcl.towers.clip import CLIP
from infcl.towers.config import kept_patches
from infcl.towers.transformer import ResidualBlock
from infcl.train.optim import ALIGNED

_log = logging.getLogger(__name__)
_RECOMPILE_LIMIT = 64  # variants: two towers, with and without gradient, each batch size
PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of other precisions: float32


def prepare_blocks(model: CLIP, config: TrainConfig, parallel: Parallel, precision: str, batch: BatchPlan) -> bool:
    """What --compile-blocks says, for the batch sizes that the two passes of a step have. True: blocks are compiled."""
    auto = config.compile_blocks == "auto" and parallel.device.type == "cuda"
    wanted = auto or config.compile_blocks == "on"
    groups = {min(config.encode_micro_batches, batch.num_micro_batches), 1}
    share = parallel.tp_size if config.sequence_parallel else 1  # a block then sees its rank's samples only
    sizes = {-(-n * batch.micro_batch_size // share) for n in groups}
    return wanted and compile_blocks(model, parallel.device, precision, sizes, communicates=parallel.tp_size > 1)


def compile_blocks(
    model: CLIP, device: torch.device, precision: str, batch_sizes: set[int], *, communicates: bool = False
) -> bool:
    """Compile the blocks of both towers for `batch_sizes`. False when that failed: then nothing has changed.

    communicates: blocks send while they compute; the compiler then keeps their order, and does not save memory by it.
    """
    torch._dynamo.config.recompile_limit = max(_RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    if odd := [n for n, p in model.named_parameters() if ".resblocks." in n and p.numel() % ALIGNED]:
        _log.warning("the towers' blocks run eagerly: the size of %s is no multiple of %d", odd[0], ALIGNED)
        return False
    options: Any = {"reorder_for_peak_memory": False} if communicates else None
    compiled = torch.compile(ResidualBlock.forward, dynamic=False, options=options)
    run = partial(_run, compiled, frozenset(batch_sizes))
    try:
        for block, length, dtype in _examples(model, precision):
            _try(block, run, length, dtype, device, precision, batch_sizes)
    except Exception as error:  # compilers raise many types; whatever it is, eager blocks need none of it
        cause = (str(error).strip().splitlines() or [""])[0]
        _log.warning("the towers' blocks run eagerly, torch.compile failed: %s: %s", type(error).__name__, cause)
        return False
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            module.forward = partial(run, module)  # type: ignore[method-assign]  # hooks stay around it
    return True


def _run(compiled, batch_sizes: frozenset[int], block: ResidualBlock, x: torch.Tensor) -> torch.Tensor:
    return compiled(block, x) if len(x) in batch_sizes else ResidualBlock.forward(block, x)


def _examples(model: CLIP, precision: str) -> list[tuple[Any, int, torch.dtype]]:
    """(a block, tokens that it will see, dtype of its input) of each tower."""
    vision = model.cfg.vision_cfg
    tokens = 1 + kept_patches(vision.num_patches, vision.patch_dropout)
    dtype = PARAMETER_DTYPES.get(precision, torch.float32)
    image_dtype = torch.bfloat16 if precision == "amp_bf16" else dtype  # the first convolution's; texts start in fp32
    image, text = model.visual.transformer.resblocks[0], model.transformer.resblocks[0]
    return [(image, tokens, image_dtype), (text, model.context_length, dtype)]


def _try(
    block: ResidualBlock,
    run,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    precision: str,
    batch_sizes: set[int],
) -> None:
    """Compile and run a copy of `block` as training will: without gradients, and (the smallest batch) with them."""
    block = copy.deepcopy(block).to(device, PARAMETER_DTYPES.get(precision, torch.float32))
    trains = any(parameter.requires_grad for parameter in block.parameters())
    width = block.attn.out_proj.in_features
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "amp_bf16"):
        for size in sorted(batch_sizes):
            x = torch.zeros(size, length, width, device=device, dtype=dtype)
            with torch.no_grad():
                run(block, x)
            if trains and size == min(batch_sizes):
                run(block, x.requires_grad_()).sum().backward()
