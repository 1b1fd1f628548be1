"""Attention kernels of the towers (--attention).

    torch     torch's scaled_dot_product_attention (cuDNN's kernels on a GPU)
    triton    triton_attention.py: up to 128 tokens, and some longer sequences, where cuDNN's tiles of 128 x 128
              compute at least 1.5 times the necessary scores (`fits`); head widths 16, 32, 64
    auto      triton where it fits, on a GPU in half precision; else torch

On an H200, triton trains ViT-B-32 1024 x 4 faster by 9% and ViT-L-14 by 4%. With this kernel a text tower takes the
spans of packed captions (packing.caption_spans) instead of a mask. torch.compile sees the kernel as one operator.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from infcl.models.clip import CLIP
from infcl.models.config import kept_patches
from infcl.models.transformer import attend as attend_by_torch

LONGEST = 128  # tokens of one tile: triton_attention.TILES
BLOCK, SHORT = 64, 16  # tokens per block; most tokens after the last full block: triton_attention_blocks
HEADS = (16, 32, 64)  # head widths; only 64 was timed


def choose_attention(model: nn.Module, attention: str, device: torch.device, dtype: torch.dtype) -> None:
    """Set each tower's attention kernel. Call this before the blocks are compiled.

    Args:
        model: the model; `attn.attend` of its blocks is replaced where the Triton kernel fits.
        attention: "torch", or "auto" for the Triton kernel where it fits.
        device: device of the towers.
        dtype: dtype of the attention's matmuls.
    """
    if attention == "torch" or not isinstance(model, CLIP) or not _runs(device, dtype):
        return
    lengths = _lengths(model)
    for name, tower in model.transformers.items():
        first: Any = tower.resblocks[0].attn
        if first.head_width in HEADS and fits(lengths[name], causal=first.causal):
            for block in cast(Any, tower.resblocks):
                block.attn.attend = partial(attend, longest=lengths[name])
            model.attends_spans |= name == "text"


def towers_with_kernel(model: Any) -> list[str]:
    """Return the names of the towers that use the Triton kernel."""
    firsts = {name: tower.resblocks[0] for name, tower in model.transformers.items()}
    return [name for name, first in firsts.items() if first.attn.attend is not attend_by_torch]


def _lengths(model: CLIP) -> dict[str, int]:
    """Return {tower: tokens per sequence in training}."""
    vision = model.cfg.vision_cfg
    dropout = vision.patch_dropout if model.visual.training else 0.0  # a locked tower sees all patches
    return {"image": 1 + kept_patches(vision.num_patches, dropout), "text": model.context_length}


def attend(qkv: Tensor, seen: Tensor | None, *, causal: bool, longest: int) -> Tensor:
    """Compute transformer.attend with the Triton kernel.

    Full sequences that do not fit, such as those of an evaluation without patch dropout, use torch's kernels.

    Args:
        qkv: [m, L, 3, h, d].
        seen: spans int64 [n, 2] of packed captions (packing.caption_spans), or None.
        causal: each token attends to itself and to earlier tokens only.
        longest: upper bound of the tokens in a span.

    Returns:
        [m, L, h, d].
    """
    if seen is None and not fits(qkv.shape[1], causal=causal):
        return attend_by_torch(qkv, seen, causal=causal)
    length = qkv.shape[1] if seen is None else longest
    out, _ = _forward(qkv.flatten(0, 1), seen, length, causal)
    return out.view(*qkv.shape[:2], *qkv.shape[3:])


def fits(length: int, *, causal: bool) -> bool:
    """Return whether the Triton kernel is faster for sequences of `length` tokens, forward and backward together.

    It is faster for sequences that fit in one tile. Without a causal mask it is also faster for two to four blocks plus
    a few tokens, which cuDNN computes in full tiles of 128.
    """
    return length <= LONGEST or (not causal and 2 <= length // BLOCK <= 4 and 0 < length % BLOCK <= SHORT)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs on `device`, and computes in `dtype`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    can = device.type == "cuda" and dtype.itemsize == 2 and find_spec("triton") is not None
    return can and torch.cuda.get_device_capability(device)[0] >= 8


# ---- the kernel as an operator of torch ----


def _attention(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    from infcl.models.triton_attention import attention_forward

    return attention_forward(qkv.contiguous(), spans, length, causal)


def _fake_forward(qkv: Tensor, spans: Tensor | None, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    shape = (qkv.shape[0], qkv.shape[2]) if length > LONGEST else (0,)
    lse = qkv.new_empty(shape, dtype=torch.float32)
    return qkv.new_empty(qkv.shape[0], *qkv.shape[2:]), lse


def _attention_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, spans: Tensor | None, length: int, causal: bool
) -> Tensor:
    from infcl.models.triton_attention import attention_backward

    return attention_backward(d_out.contiguous(), qkv.contiguous(), out, lse, spans, length, causal)


def _fake_backward(d_out: Tensor, qkv: Tensor, *_) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx, inputs, output) -> None:
    qkv, spans, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, spans)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out: Tensor, _):
    return _backward(d_out, *ctx.saved_tensors, *ctx.options), None, None, None


def _operator(name: str, function: Callable, schema: str, fake: Callable) -> Callable:
    """Define infcl::<name> with torch.library directly: a call costs less host time than through custom_op."""
    torch.library.define(f"infcl::{name}", schema)
    torch.library.impl(f"infcl::{name}", ("cpu", "cuda"), function)
    torch.library.register_fake(f"infcl::{name}", fake)
    return getattr(torch.ops.infcl, name).default


_OPTIONS = "Tensor? spans, int length, bool causal"
_forward = _operator("attention", _attention, f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor)", _fake_forward)
_BACKWARD = f"(Tensor d_out, Tensor qkv, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor"
_backward = _operator("attention_backward", _attention_backward, _BACKWARD, _fake_backward)
torch.library.register_autograd("infcl::attention", _gradients, setup_context=_keep)
