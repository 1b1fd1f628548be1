"""A row of benchmarks.tensor_parallel: what it says does not depend on how long was measured."""

import json
import sys

import pytest

from benchmarks.tensor_parallel import _measure, _parse, settings
from infcl.models import load_model_config
from tests.lib.ranks import run_ranks


def loss_after(rank: int, world_size: int, setting: dict) -> float:
    return _measure(setting)["loss"]


def setting_of(repeats: str, monkeypatch, *, model: str = "demo", size: int = 1) -> dict:
    flags = (
        f"--gpus {size} --models {model} --sizes {size} --stages 1 --batch-sizes 4 --device cpu --compile-blocks off"
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks.tensor_parallel", *flags.split(), "--repeats", repeats])
    (setting,) = settings(_parse())
    return setting


def test_the_loss_of_a_row_is_that_of_one_step_whatever_the_repeats(monkeypatch):
    losses = [run_ranks(loss_after, 1, setting_of(repeats, monkeypatch)) for repeats in ("3", "5")]
    assert losses[0] == losses[1]


def test_two_tensor_parallel_ranks_measure_the_steps_of_one(monkeypatch, tmp_path):
    fields = load_model_config("demo").to_dict()
    fields["vision_cfg"] |= {"head_width": 24}  # heads that two ranks can share
    fields["text_cfg"] |= {"heads": 4}
    model = tmp_path / "four_heads.json"
    model.write_text(json.dumps(fields))
    one, two = (setting_of("3", monkeypatch, model=str(model), size=size) for size in (1, 2))
    (alone,) = run_ranks(loss_after, 1, one)
    assert run_ranks(loss_after, 2, two) == pytest.approx([alone] * 2, rel=1e-4)


def test_fewer_repeats_than_it_has_to_run_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        setting_of("2", monkeypatch)
    assert "--repeats 2 is below 3" in capsys.readouterr().err
