"""Losses that benchmarks.loss measures: infcl's, those of peers, and variants that isolate parts of the design.

Every entry is `call(images, texts, scale, bias)` with features [b, D] of this rank, and returns a differentiable loss.
Peers are called as in their own trainers: the official loss once per direction, open_clip's modules with local loss and
gathered gradients.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infcl import RingOptions, distillation_loss, inf_cl_loss, info_nce_loss, matryoshka, nt_xent_loss
from infcl.loss.contrastive import LOSSES, TILED, ContrastiveLoss
from infcl.loss.dense import dense_loss

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_MARGIN = 0.1

OTHERS = {
    "clip_compiled": "the dense loss under torch.compile",
    "one_tile": "the ring alone: each block pair as one dense float32 matrix (the paper's cross-GPU tiling)",
    "official": "the inf_cl package, if installed",
    "official_siglip": "open_clip's SigLipLoss, from --open-clip-loss",
    "official_open_clip": "open_clip's ClipLoss, from --open-clip-loss",
    "siglip_kernel": "the siglip-kernel package (one GPU), if installed",
    "info_nce": "queries against twice as many documents; b queries",
    "nt_xent": "two views of b / 2 samples: a b x b matrix",
    "hard_negatives": "inf_cl with one hard-negative caption per image",
    "inf_cl_margin": "inf_cl, negatives 0.1 above their match left out; and in dense PyTorch:",
    "clip_margin": "margin, dense",
    "siglip_margin": "siglip, negatives 0.1 above their match left out",
    "matryoshka": "inf_cl at an eighth, a quarter, half and all of the dimensions",
    "distillation": "KL to a teacher of as many dimensions; and in dense PyTorch:",
    "clip_distillation": "distillation, dense",
    **{
        f"{loss}_{duplicates}": f"{loss} with image ids, five samples each, duplicates={duplicates!r}"
        for loss in TILED
        for duplicates in ("mask", "positive")
    },
}
NAMES = (*LOSSES, *OTHERS)
WITH_IDS = tuple(name for name in OTHERS if name.rpartition("_")[2] in ("mask", "positive"))


def make(name: str, group: dist.ProcessGroup | None, options: dict, open_clip_loss: Path | None) -> Loss:
    """Return the loss of this name.

    Args:
        group: ranks that share the batch.
        options: fields of RingOptions, of the tiled losses.
        open_clip_loss: open_clip's loss.py.

    Raises:
        ValueError: the loss needs a peer that is missing.
    """
    ring = RingOptions(**options)
    if name in LOSSES:
        return ContrastiveLoss(name, group=group, options=ring)
    if name == "clip_compiled":
        torch._dynamo.reset()  # it would stop compiling at the ninth wrapper of a kind
        compiled = torch.compile(partial(dense_loss, impl="clip", group=group))
        return lambda images, texts, scale, bias: compiled(images, texts, scale)
    if name in WITH_IDS:
        loss, _, duplicates = name.rpartition("_")
        ours = ContrastiveLoss(loss, group=group, duplicates=duplicates, options=ring)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        return lambda images, texts, scale, bias: ours(
            images, texts, scale, bias, ids=_image_ids(size * len(images), images.device).chunk(size)[rank]
        )
    if name.endswith("_margin") and name != "clip_margin":
        return ContrastiveLoss(name.removesuffix("_margin"), group=group, margin=_MARGIN, options=ring)
    if name == "matryoshka":
        whole = partial(inf_cl_loss, group=group, options=ring)
        return lambda images, texts, scale, bias: matryoshka(whole, [images.shape[1] // n for n in (8, 4, 2, 1)])(
            images, texts, scale
        )
    if name == "distillation":
        return lambda images, texts, scale, bias: distillation_loss(
            images, texts, scale, teacher_scale=50.0, group=group, options=ring,
            **dict(zip(("teacher_image_features", "teacher_text_features"), _teacher(images))),
        )  # fmt: skip
    if name in ("clip_margin", "clip_distillation"):
        if group is not None:
            raise ValueError(f"{name} runs on one GPU")
        return _dense_margin if name == "clip_margin" else _dense_distillation
    if name == "one_tile":
        return ContrastiveLoss("inf_cl", group=group, options=RingOptions(tile="torch", workspace_bytes=2**50))
    if name == "official":
        return _official
    if name == "siglip_kernel":
        from siglip_kernel import fused_siglip_loss

        return lambda images, texts, scale, bias: fused_siglip_loss(images, texts, scale.log(), bias)
    if name.startswith("official_"):
        return _open_clip(name, group, open_clip_loss)
    if name == "info_nce":
        return lambda images, texts, scale, bias: info_nce_loss(
            images,
            torch.cat([texts, texts.detach().roll(1, 1)]),
            torch.arange(len(images), device=images.device),
            scale,
            group=group,
            options=ring,
        )
    if name == "hard_negatives":
        with_captions = ContrastiveLoss("inf_cl", group=group, captions=1, options=ring)
        return lambda images, texts, scale, bias: with_captions(
            images, torch.stack([texts, texts.detach().roll(1, 1)], 1).flatten(0, 1), scale
        )
    if name == "nt_xent":
        return lambda images, texts, scale, bias: nt_xent_loss(*images.chunk(2), scale, group=group, options=ring)
    raise ValueError(f"unknown implementation '{name}'; one of {NAMES}")


def _dense_margin(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    cosines, own = (images @ texts.T).float(), torch.arange(len(images), device=images.device)
    limits = cosines.detach().diagonal() + _MARGIN
    rows, columns = (cosines.masked_fill(cosines > limit, -torch.inf) * scale for limit in (limits[:, None], limits))
    return (F.cross_entropy(rows, own) + F.cross_entropy(columns.T, own)) / 2


def _dense_distillation(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    teacher_images, teacher_texts = _teacher(images)
    logits, wanted = (images @ texts.T).float() * scale, (teacher_images @ teacher_texts.T).float() * 50.0
    one, other = (
        F.kl_div(a.log_softmax(1), b.log_softmax(1), reduction="batchmean", log_target=True)
        for a, b in ((logits, wanted), (logits.T, wanted.T))
    )
    return (one + other) / 2


@cache
def _teacher_features(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    first, second = (
        F.normalize(torch.randn(rows, dim, device=device, generator=generator), dim=1).to(dtype) for _ in range(2)
    )
    return first, second


def _teacher(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of a teacher for a student's batch."""
    return _teacher_features(*images.shape, images.dtype, images.device)


@cache
def _image_ids(count: int, device: torch.device) -> Tensor:
    """Return int64 [count]: five samples of each image, at random positions."""
    return (torch.randperm(count, generator=torch.Generator().manual_seed(0)) // 5).to(device)


def _official(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    from inf_cl import cal_inf_loss

    return (cal_inf_loss(images, texts, scale=scale) + cal_inf_loss(texts, images, scale=scale)) / 2


def peer_module(path: Path) -> ModuleType:
    """Import a single file of a peer, whose package and dependencies need not be installed."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_clip(name: str, group: dist.ProcessGroup | None, path: Path | None) -> Loss:
    if path is None:
        raise ValueError(f"{name} needs --open-clip-loss .../open_clip/loss.py")
    module = peer_module(path)
    place = {"rank": dist.get_rank(group), "world_size": dist.get_world_size(group)} if group is not None else {}
    if name == "official_siglip":
        siglip = module.SigLipLoss(**place)
        return lambda images, texts, scale, bias: siglip(images, texts, scale.to(images.dtype), bias.to(images.dtype))
    clip = module.ClipLoss(local_loss=True, gather_with_grad=True, **place)
    return lambda images, texts, scale, bias: clip(images, texts, scale.to(images.dtype))
