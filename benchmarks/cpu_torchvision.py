"""Make torchvision, which open_clip imports, importable with a torch without CUDA.

The operators in torchvision's wheel link against CUDA libraries. A CPU-only torch cannot register them, so the import
of torchvision fails. Nothing here runs these operators, so it is enough to declare their names.
"""

import os

import torch

_libraries: list[torch.library.Library] = []  # keeps them alive: torch unregisters the operators of a deleted library


def declare_torchvision_operators() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if torch.version.cuda is None and not _libraries:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
