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
from torch import Tensor

from infcl import RingOptions, info_nce_loss, nt_xent_loss
from infcl.loss.contrastive import LOSSES, TILED, ContrastiveLoss
from infcl.loss.dense import dense_loss

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

OTHERS = {
    "clip_compiled": "the dense loss under torch.compile",
    "one_tile": "the ring alone: each block pair as one dense float32 matrix (the paper's cross-GPU tiling)",
    "official": "the inf_cl package, if installed",
    "official_siglip": "open_clip's SigLipLoss, from --open-clip-loss",
    "official_open_clip": "open_clip's ClipLoss, from --open-clip-loss",
    "info_nce": "queries against twice as many documents; b queries",
    "nt_xent": "two views of b / 2 samples: a b x b matrix",
    "hard_negatives": "inf_cl with one hard-negative caption per image",
    **{
        f"{loss}_{duplicates}": f"{loss} with image ids, five samples each, duplicates={duplicates!r}"
        for loss in TILED
        for duplicates in ("mask", "positive")
    },
}
NAMES = (*LOSSES, *OTHERS)
WITH_IDS = tuple(name for name in OTHERS if name.rpartition("_")[0] in TILED)


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
    if name == "one_tile":
        return ContrastiveLoss("inf_cl", group=group, options=RingOptions(tile="torch", workspace_bytes=2**50))
    if name == "official":
        return _official
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

        def halves(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            first, second = images.chunk(2)
            return nt_xent_loss(first, second, scale, group=group, options=ring)

        return halves
    raise ValueError(f"unknown implementation '{name}'; one of {NAMES}")


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
