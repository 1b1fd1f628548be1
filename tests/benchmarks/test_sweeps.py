"""The committed sweeps of benchmarks.step: every line is a setting that the trainer takes."""

import shlex

import pytest

from benchmarks.step import SYNTHETIC, _parse
from infcl.config import parse_args
from tests.lib.checkout import ROOT

FILES = sorted(ROOT.glob("benchmarks/sweeps/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_line_of_a_sweep_is_a_setting_that_the_trainer_takes(path):
    lines = [setting for line in path.read_text().splitlines() if (setting := line.split("#")[0].strip())]
    assert lines
    for line in lines:
        options, flags = _parse(shlex.split(line))
        preset = ROOT / "ds_configs" / f"zero{options.zero}.json"
        assert preset.is_file(), line
        parse_args([*SYNTHETIC, "--model", "ViT-L-14", "--deepspeed_config", str(preset), *flags])
