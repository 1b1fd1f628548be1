"""open_clip for the parity tests, also where torch has no CUDA."""

import pytest

from benchmarks.cpu_torchvision import declare_torchvision_operators


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
