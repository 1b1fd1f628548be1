"""Import open_clip for the parity tests, even if torch has no CUDA."""

import pytest

from benchmarks.cpu_torchvision import declare_torchvision_operators


def import_open_clip():
    """Return the open_clip module; skip the calling test if it is not installed."""
    declare_torchvision_operators()
    return pytest.importorskip("open_clip")


def import_transformers():
    """Return the transformers module, whose CLIP imports torchvision; skip the calling test if it is not installed."""
    declare_torchvision_operators()
    return pytest.importorskip("transformers")


def import_timm_optimizers():
    """Return timm.optim, which imports torchvision; skip the calling test if it is not installed."""
    declare_torchvision_operators()
    return pytest.importorskip("timm.optim")
