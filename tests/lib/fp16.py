"""FP16 presets on a CPU, where DeepSpeed rejects the dtype."""

import contextlib
import json
from unittest import mock

import torch

from tests.lib.checkout import ROOT


@contextlib.contextmanager
def fp16_allowed():
    """Allow FP16 on CPUs without fast FP16 arithmetic, where DeepSpeed rejects it."""

    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    with (
        mock.patch.object(accelerator, "is_fp16_supported", lambda self: True),
        mock.patch.object(accelerator, "supported_dtypes", lambda self: [torch.float32, torch.float16]),
        mock.patch("infcl.config.preset.cpu_computes_fp16", lambda: True),
    ):
        yield


def fp16_preset(folder, preset) -> str:
    """Write a preset of ds_configs/ in FP16, with a loss scale that does not overflow in these steps."""
    sections = json.loads((ROOT / f"ds_configs/{preset}.json").read_text())
    sections["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    (folder / "p.json").write_text(json.dumps(sections))
    return str(folder / "p.json")
