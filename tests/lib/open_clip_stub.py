"""Import packages that import torchvision, even if torch has no CUDA; skip the calling test if one is not installed."""

from functools import partial

import pytest

from benchmarks.cpu_torchvision import declare_torchvision_operators


def _imported(name: str):
    declare_torchvision_operators()
    return pytest.importorskip(name)


import_open_clip = partial(_imported, "open_clip")
import_transformers = partial(_imported, "transformers")
import_timm_optimizers = partial(_imported, "timm.optim")
