"""Evaluations are refused before training where they could not be made, and read what training reads."""

import json

import pytest

from infcl.config import BatchPlan, parse_args
from infcl.evaluate.tasks import RetrievalTask, ZeroShotTask
from infcl.towers import load_model_config
from infcl.train.build import build_tasks
from tests.shard_files import encode, picture, write_tar

COMMON = {"tokenizer": lambda texts: None, "image_size": 8, "batch_size": 2}


def shard(folder, image, **members):
    """One tar of one sample."""
    folder.mkdir(exist_ok=True)
    write_tar(folder / "0.tar", [("a.jpg", image), *((f"a.{name}", value) for name, value in members.items())])
    return str(folder)


@pytest.mark.parametrize("task", [RetrievalTask, ZeroShotTask])
def test_a_set_without_a_usable_sample_is_refused_when_the_task_is_built(tmp_path, task):
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    (tmp_path / "templates.txt").write_text("a {}\n")
    options = COMMON | {f"{n}s": str(tmp_path / f"{n}s.txt") for n in ("classname", "template") if task is ZeroShotTask}
    good = json.dumps({"caption": "a cat", "label": 1}).encode()
    task(shard(tmp_path / "good", encode(picture(1)), json=good), **options)
    with pytest.raises(ValueError, match=r"broken: no image .*\(not_an_image: 1\)"):
        task(shard(tmp_path / "broken", b"<html>", json=good), **options)
    with pytest.raises(ValueError, match="no image with a caption|has label 'bird'"):
        task(shard(tmp_path / "bare", encode(picture(1)), json=b'{"label": "bird"}'), **options)


@pytest.mark.parametrize(
    ("flags", "members"),
    [
        (["--json-text-key", "alt"], {"json": b'{"alt": "a cat"}'}),
        (["--text-key", "words"], {"words": b"a cat"}),
        (["--json-text-key", "alt", "--text-key", "words"], {"txt": b"a cat"}),  # the format's own is read too
    ],
)
def test_validation_data_has_its_captions_where_training_data_has_them(tmp_path, flags, members):
    data = shard(tmp_path / "val", encode(picture(1)), **members)
    config = parse_args(["--train-data", data, "--tokenizer", __file__, "--val-data", data, *flags])
    task = build_tasks(config, BatchPlan(1, 1, 2), load_model_config("demo"), lambda texts: None)["retrieval"]
    assert [task._captions(sample) for sample in task.source()] == [["a cat"]]
