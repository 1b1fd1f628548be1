"""open_clip for the parity tests, also where torch has no CUDA.

torchvision has no CPU build of its own: its wheel's binary operators link against CUDA libraries and stay unregistered
under a CPU-only torch, on which its import fails. Nothing here runs them, so declaring their names is enough.
"""

import os

import pytest
import torch

_libraries: list[torch.library.Library] = []  # torch unregisters a library's operators when the object goes


def import_open_clip():
    """The open_clip module; skips the calling test where it is not installed."""
    declare_torchvision_operators()
    return pytest.importorskip("open_clip")


def import_transformers():
    """The transformers module, whose CLIP imports torchvision too; skips the calling test likewise."""
    declare_torchvision_operators()
    return pytest.importorskip("transformers")


def import_timm_optimizers():
    """timm.optim, which imports torchvision too; skips likewise."""
    declare_torchvision_operators()
    return pytest.importorskip("timm.optim")


def declare_torchvision_operators():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if torch.version.cuda is None and not _libraries:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
