"""Peak memory of a computation, counted from every tensor that an operation makes."""

import gc
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infcl import RingOptions, inf_cl_loss, info_nce_loss, nt_xent_loss, siglip_loss
from infcl.loss.captions import captions_loss

_WORKSPACE_BYTES = {"torch": 2**10, "triton": 2**8}  # one Triton tile is more


def _with_ids(loss: Callable, *arguments: float, duplicates: str = "mask") -> Callable:
    def call(images, texts, **options):
        ids = torch.arange(len(images), device=images.device) // 3
        return loss(images, texts, *arguments, ids=ids, duplicates=duplicates, **options)

    return call


def _info_nce(images, texts, **options):
    positives = torch.arange(len(images), device=images.device).flip(0) // 2  # two queries share a document
    return info_nce_loss(images, texts, positives, 10.0, **options)


def _nt_xent(images, texts, **options):
    return nt_xent_loss(*images.chunk(2), 10.0, **options)


def _captions(images, texts, **options):
    return captions_loss(images[: len(images) // 3], texts[: len(images) // 3 * 3], 10.0, captions=2, **options)


TILED_LOSSES: dict[str, Callable] = {
    "inf_cl": lambda images, texts, **options: inf_cl_loss(images, texts, 10.0, **options),
    "inf_cl, duplicates masked": _with_ids(inf_cl_loss, 10.0),
    "inf_cl, duplicates as positives": _with_ids(inf_cl_loss, 10.0, duplicates="positive"),
    "siglip": lambda images, texts, **options: siglip_loss(images, texts, 10.0, -3.0, **options),
    "siglip, duplicates as positives": _with_ids(siglip_loss, 10.0, -3.0, duplicates="positive"),
    "info_nce": _info_nce,
    "nt_xent": _nt_xent,
    "two captions, a hard negative": _captions,
}


def require_constant_bytes_per_row(name: str, tile: str, device: str = "cpu") -> None:
    """Check that each further row takes as much memory as the earlier ones.

    The slope between n and 2n rows equals that between 2n and 4n within 10%, after the forward and after the backward.
    """
    counts = (64, 128, 256) if device == "cuda" else (32, 64, 128)
    peaks, options = [], RingOptions(tile, workspace_bytes=_WORKSPACE_BYTES[tile])
    for rows in counts:
        images, texts = (torch.randn(rows, 8, device=device, requires_grad=True) for _ in range(2))
        with LiveBytes() as live:
            loss = TILED_LOSSES[name](images, texts, options=options)
            forward = live.most
            loss.backward()
        peaks.append((forward, live.most))
    for direction, (first, second, third) in zip(("forward", "forward and backward"), zip(*peaks)):
        early, late = (second - first) / (counts[1] - counts[0]), (third - second) / (counts[2] - counts[1])
        assert abs(late - early) <= 0.1 * early, (name, tile, direction, f"{early:.0f}, then {late:.0f} bytes per row")


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made under it that are there at once.

    The garbage collector is off under it, since what it frees depends on all objects that were made before.
    """

    def __init__(self):
        super().__init__()
        self.there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __enter__(self):
        gc.collect()
        gc.disable()
        return super().__enter__()

    def __exit__(self, *error):
        gc.enable()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        result = function(*arguments, **(kwargs or {}))
        found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        new = [one for one in found if one._cdata not in self.there or self.there[one._cdata][0].expired()]
        if new:  # not a view, or a tensor that was written in place
            self.there = {key: held for key, held in self.there.items() if not held[0].expired()}
            self.there |= {one._cdata: (StorageWeakRef(one), one.nbytes()) for one in new}
            self.most = max(self.most, sum(size for _, size in self.there.values()))
        return result
