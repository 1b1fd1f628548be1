"""torchvision next to a torch without CUDA: open_clip imports it.

torchvision has no CPU build of its own: its wheel's binary operators link against CUDA libraries and stay unregistered
under a CPU-only torch, on which its import fails. Nothing here runs them, so declaring their names is enough.
"""

import os

import torch

_libraries: list[torch.library.Library] = []  # torch unregisters a library's operators when the object goes


def declare_torchvision_operators() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if torch.version.cuda is None and not _libraries:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
