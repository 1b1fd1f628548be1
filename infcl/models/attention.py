"""--attention: whose kernels compute the towers' attention.

    torch     torch's scaled_dot_product_attention, cuDNN's on a GPU
    triton    kernels/triton_attention.py, for sequences of up to 128 tokens, and of some more, where cuDNN's tiles of
              128 have 1.5 times the pairs or more (`fits`); heads of 16, 32 or 64. A forward alone loses at 197
    auto      triton where it can be, on a GPU in 16 bits, else torch

A text tower that has it is told where packed captions lie (packing.caption_spans) in the place of a mask, and computes
each as if it were alone. To torch.compile the kernel is one operator.
"""

import logging
import os
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.kernels.operators import operator
from infcl.models.clip import CLIP
from infcl.models.config import kept_patches
from infcl.models.packing import caption_spans
from infcl.models.self_test import cause_of, require_near
from infcl.models.transformer import Attention, Transformer
from infcl.models.transformer import attend as attend_by_torch
from infcl.parallel import max_over

LONGEST = 128  # tokens of one tile: triton_attention.TILES
BLOCK, SHORT = 64, 16  # tokens of a block, and that may follow whole blocks: triton_attention_blocks
APART = 0.02  # of a norm in 16 bits: rounding is a tenth of it
_HEADS = (16, 32, 64)  # 64 was timed
_KERNEL = "the Triton kernel"
_log = logging.getLogger(__name__)


def choose_attention(model: CLIP, attention: str, device: torch.device, dtype: torch.dtype) -> None:
    """Give the towers what --attention names, before blocks are compiled; dtype: what attention computes in.

    Collective where there are several ranks, which choose alike. ValueError where `triton` can be in neither tower,
    with the reasons. `auto` leaves torch's, with a warning, where the kernel fails or computes something else.
    """
    if attention == "torch":
        return
    towers, reasons = _towers(model), {}
    for name, (tower, lengths) in towers.items():
        first: Any = tower.resblocks[0].attn
        reason = _not_here(device, dtype) or unfit(lengths[0], first.head_width, causal=first.causal)
        try:
            for length in lengths if not reason else []:
                if fits(length, causal=first.causal):
                    _try(first, length, device, dtype)
        except Exception as error:  # compilers and drivers raise many types; whatever it is, torch's needs none of it
            reason = f"{_KERNEL} failed: {cause_of(error)}"
            _log.warning("the %s tower's attention is torch's, %s", name, reason)
        reasons[name] = reason
    if dist.is_initialized():
        failed = max_over(dist.group.WORLD, [bool(reason) for reason in reasons.values()], device)
        elsewhere = dict(zip(reasons, ("it failed on another rank" if one else "" for one in failed)))
        reasons = {name: reason or elsewhere[name] for name, reason in reasons.items()}
    if attention == "triton" and all(reasons.values()):
        raise ValueError("--attention triton: " + "; ".join(f"{name} tower: {why}" for name, why in reasons.items()))
    for tower, lengths in (towers[name] for name, reason in reasons.items() if not reason):
        for block in cast(Any, tower.resblocks):
            block.attn.attend = partial(attend, longest=lengths[0])
    if not reasons["text"]:
        model.caption_places = caption_spans


def towers_with_kernel(model: CLIP) -> list[str]:
    """Those whose attention `choose_attention` has changed."""
    firsts = {name: cast(Any, tower.resblocks[0]) for name, (tower, _) in _towers(model).items()}
    return [name for name, first in firsts.items() if first.attn.attend is not attend_by_torch]


def _towers(model: CLIP) -> dict[str, tuple[Transformer, list[int]]]:
    """By name: the tower, and how many tokens its sequences have in training, and in evaluations where that differs."""
    vision = model.cfg.vision_cfg
    dropout = vision.patch_dropout if model.visual.training else 0.0  # a locked tower sees all patches
    images = dict.fromkeys([1 + kept_patches(vision.num_patches, dropout), 1 + vision.num_patches])
    return {"image": (model.visual.transformer, list(images)), "text": (model.transformer, [model.context_length])}


def attend(qkv: Tensor, seen: Tensor | None, *, causal: bool, longest: int) -> Tensor:
    """transformer.attend, where `seen` is None or spans int64 [n, 2] of `longest` tokens at most. Whole sequences that
    do not fit, as those of an evaluation without patch dropout may not, are torch's.
    """
    if seen is None and not fits(qkv.shape[1], causal=causal):
        return attend_by_torch(qkv, seen, causal=causal)
    length = qkv.shape[1] if seen is None else longest
    out, _ = _forward(qkv.flatten(0, 1), seen, length, causal)
    return out.view(*qkv.shape[:2], *qkv.shape[3:])


def fits(length: int, *, causal: bool) -> bool:
    """Whether a forward with its backward over so many tokens is faster by the kernel: those of one tile, and whole
    ones where few follow two, three or four blocks, of which cuDNN computes whole tiles of 128 in each direction.
    """
    return length <= LONGEST or (not causal and 2 <= length // BLOCK <= 4 and 0 < length % BLOCK <= SHORT)


def unfit(length: int, head_width: int, *, causal: bool) -> str:
    """Why the kernel is not for such sequences; empty where it is."""
    if not fits(length, causal=causal):
        return f"sequences of {length} tokens, which torch's kernels take better"
    if head_width not in _HEADS:
        return f"heads of {head_width}, and the kernel has those of {', '.join(map(str, _HEADS))}"
    return ""


def _not_here(device: torch.device, dtype: torch.dtype) -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if device.type != "cuda":
        return f"{_KERNEL} needs a GPU, not {device}"
    return "" if dtype.itemsize == 2 else f"{_KERNEL} computes in 16 bits, not in {dtype}"


def _try(attention: Attention, length: int, device: torch.device, dtype: torch.dtype) -> None:
    """The kernel beside torch's, with gradients, on whole sequences and, where these are causal, on parts.

    SomethingElse where it is not what torch's is.
    """
    causal, heads = attention.causal, attention.in_proj_bias.numel() // 3 // attention.head_width
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    qkv = drawn(2, length, 3, heads, attention.head_width).requires_grad_()
    d_out = drawn(2, length, heads, attention.head_width)
    places, spans, masks = torch.arange(length), [], []
    for row, begins in enumerate((sorted({0, min(1, length - 1), length // 4}), [0])):  # in parts, and whole
        spans += [[row * length + a, b - a] for a, b in zip(begins, [*begins[1:], length])]
        part = torch.bucketize(places, torch.tensor(begins), right=True)
        masks.append((part[:, None] == part) & (places[:, None] >= places))
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
    if causal:
        pairs.append((torch.tensor(spans, device=device), torch.stack(masks).unsqueeze(1).to(device)))
    for seen, masked in pairs:
        found = _with_gradient(partial(attend, longest=length), qkv, d_out, seen, causal)
        expected = _with_gradient(attend_by_torch, qkv, d_out, masked, causal)
        require_near(found, expected, APART, f"it computes something else at {length} tokens")


def _with_gradient(attend, qkv: Tensor, d_out: Tensor, seen: Tensor | None, causal: bool) -> dict[str, Tensor]:
    out = attend(qkv, seen, causal=causal)
    return {"output": out.detach(), "gradient": torch.autograd.grad(out, qkv, d_out)[0]}


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


_OPTIONS = "Tensor? spans, int length, bool causal"
_forward = operator(_attention, f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor)", _fake_forward)
_backward = operator(
    _attention_backward, f"(Tensor d_out, Tensor qkv, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor", _fake_backward
)
torch.library.register_autograd("infcl::attention", _gradients, setup_context=_keep)
