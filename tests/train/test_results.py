"""What a run tells at its start of flags that may not mean what was meant."""

import dataclasses
import shutil

from infcl.config import TrainConfig
from infcl.train.results import oddities
from tests.lib.ranks import run_ranks
from tests.lib.training import demo_config, said


def test_flags_that_do_less_than_they_seem_to_are_reported():
    for flags, printed in (
        ({}, ""),
        ({"lock_image": True}, "--lock-image without --pretrained or --pretrained-image: "),
        ({"lock_text": True, "pretrained_image": "w"}, "--lock-text without --pretrained or --pretrained-text: "),
        ({"lock_image": True, "pretrained": "w"}, ""),
        ({"matryoshka_widths": [64, 512]}, ""),
        ({"matryoshka_widths": [64, 256]}, "--matryoshka-widths end at 256 of 512 dimensions: the others stay"),
    ):
        lines = list(oddities(TrainConfig(**flags), 512))
        assert len(lines) == bool(printed) and "".join(lines).startswith(printed)


def test_a_run_reports_whose_weights_it_begins_with_and_a_resumed_one_does_not(demo_folder, tmp_path):
    small = {"batch_size": 4, "accum_freq": 1, "warmup": 0}
    first = run_ranks(said, 1, demo_config(demo_folder, tmp_path, steps=1, lock_text=True, **small))[0]
    assert "weights are those of" not in first and "the frozen part of the text tower stays" in first
    start = str(tmp_path / "run")
    second = demo_config(demo_folder, tmp_path, name="second", steps=2, save_every_n_steps=1, pretrained=start, **small)
    assert f"all weights are those of {start}" in run_ranks(said, 1, second)[0].splitlines()
    (tmp_path / "second" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step_00000002")
    resumed = run_ranks(said, 1, dataclasses.replace(second, resume="latest"))[0]
    assert "at step 1" in resumed and "weights are those of" not in resumed
