"""Evaluations are rejected before training where they could not be made, and read what training reads."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from infcl.config import parse_args, resolve
from infcl.data.evaluation import EvalConfig
from infcl.evaluate import tasks
from infcl.evaluate.tasks import RetrievalTask, ZeroShotTask
from infcl.models import load_model_config
from infcl.train.build import Inputs, build_tasks
from tests.lib.ranks import rejected, run_ranks
from tests.lib.shard_files import encode, picture, write_tar

COMMON = {"tokenizer": lambda texts: None, "batch_size": 2}


def of(data):
    return EvalConfig(data=str(data), image_size=8)


def shard(folder, image, **members):
    """One tar of one sample."""
    folder.mkdir(exist_ok=True)
    write_tar(folder / "0.tar", [("a.jpg", image), *((f"a.{name}", value) for name, value in members.items())])
    return str(folder)


def of_files(folder):
    """Write classnames.txt and templates.txt; return the options of a ZeroShotTask with them."""
    files = {"classnames": "cat\ndog\n", "templates": "a {}\n"}
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    return COMMON | {name: str(folder / f"{name}.txt") for name in files}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def second_class_only(folder):
    (folder / "classes.txt").write_text("1\n")
    return {"classes": str(folder / "classes.txt")}


@pytest.mark.parametrize("task", [RetrievalTask, ZeroShotTask])
def test_a_set_without_a_usable_sample_is_rejected_before_it_is_evaluated(tmp_path, task, one_rank):
    options = of_files(tmp_path) if task is ZeroShotTask else COMMON
    good = json.dumps({"caption": "a cat", "label": 1}).encode()
    task(of(shard(tmp_path / "good", encode(picture(1)), json=good)), **options).check()
    with pytest.raises(ValueError, match=r"broken: no image .*\(not_an_image: 1\)"):
        task(of(shard(tmp_path / "broken", b"<html>", json=good)), **options).check()
    with pytest.raises(
        ValueError, match=r"no image (with a|of a) .*\((no_caption|other_class): 1; the first: .*'bird'"
    ):
        task(of(shard(tmp_path / "bare", encode(picture(1)), json=b'{"label": "bird"}')), **options).check()


def _rejection(rank, world_size, data):
    """The message of a rank, and whether it read the data itself."""
    task = RetrievalTask(of(data), **COMMON)
    read, source = [], task.source
    task.source = lambda **options: read.append(rank) or source(**options)
    return rejected(task.check), read


def test_one_rank_tries_the_data_and_all_are_told(tmp_path):
    data = shard(tmp_path / "broken", b"<html>", txt=b"a cat")
    (printed, _), *others = results = run_ranks(_rejection, 3, data)
    assert "broken: no image with a caption (not_an_image: 1)" in printed
    assert [read for _, read in results] == [[0], [], []] and all(other == printed for other, _ in others)


def test_no_more_than_the_first_samples_are_tried(tmp_path, one_rank, monkeypatch, caplog):
    """A set that begins with what is of no use may be long; sorted by class it may do so rightly."""
    options = of_files(tmp_path)
    samples = [(b"0", None)] * 5 + [(b"1", b"a dog")]
    members = [
        (f"{i}.{kind}", value)
        for i, (label, caption) in enumerate(samples)
        for kind, value in (("jpg", encode(picture(i))), ("cls", label), ("txt", caption))
        if value is not None
    ]
    write_tar(tmp_path / "sorted.tar", members)
    data = str(tmp_path / "sorted.tar")
    late = ZeroShotTask(of(data), **options, **second_class_only(tmp_path))
    for tried, begins in ((6, None), (5, "first 5 samples"), (2, "first 2 samples")):
        monkeypatch.setattr(tasks, "TRIED", tried)
        caplog.clear()
        late.check()
        assert (begins is None and not caplog.messages) or begins in caplog.messages[0]
        if begins is None:
            RetrievalTask(of(data), **COMMON).check()
        else:
            with pytest.raises(ValueError, match=f"no image with a caption among its {begins} .no_caption: "):
                RetrievalTask(of(data), **COMMON).check()
    write_tar(tmp_path / "sorted.tar", members[:-3])  # without its dog, and no longer than what is tried
    monkeypatch.setattr(tasks, "TRIED", 5)
    with pytest.raises(ValueError, match="no image of a class .other_class: 5; the first: "):
        late.check()


def test_an_image_with_a_label_of_no_class_is_skipped_and_counted(tmp_path, one_rank):
    members = [
        (f"{i}.{kind}", data) for i in range(4) for kind, data in (("png", encode(picture(i))), ("cls", b"%d" % i))
    ]
    write_tar(tmp_path / "0.tar", members)
    task = ZeroShotTask(of(str(tmp_path / "0.tar")), **of_files(tmp_path))
    task.check()
    samples = task.source()
    assert len(list(task._usable(samples))) == 2 and samples.skipped == {"other_class": 2}


def test_folders_of_no_class_are_rejected_before_an_image_is_read(tmp_path):
    options = of_files(tmp_path)
    (tmp_path / "set" / "bird").mkdir(parents=True)
    (tmp_path / "set" / "bird" / "1.jpg").write_bytes(b"")
    (tmp_path / "set" / ".cache").mkdir()
    with pytest.raises(ValueError, match="none of its 1 folders is a class of .*classes.txt"):
        ZeroShotTask(of(tmp_path / "set"), **options, **second_class_only(tmp_path))


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
    task = build_tasks(Inputs(resolve(config, device="cpu"), load_model_config("demo"), lambda texts: None))[
        "retrieval"
    ]
    assert [task.target(sample) for sample in task.source()] == [["a cat"]]


def test_all_captions_of_a_long_text_member_count(tmp_path):
    """Training cuts a text member at 4 KB; here it may hold many captions."""
    captions = [f"{i} {'long ' * 30}".strip() for i in range(40)]
    data = shard(tmp_path / "many", encode(picture(1)), txt="\n".join(captions).encode())
    task = RetrievalTask(dataclasses.replace(of(data), captions="lines"), **COMMON)
    assert [task.target(sample) for sample in task.source()] == [captions]


def test_class_folders_without_files_take_their_names_and_one_prompt(tmp_path, one_rank):
    for folder in ("great_white_shark", "cock"):
        (tmp_path / "set" / folder).mkdir(parents=True)
        (tmp_path / "set" / folder / "0.png").write_bytes(encode(picture(1)))
    task = ZeroShotTask(of(tmp_path / "set"), **COMMON)
    task.check()
    assert task.classes.names == ["cock", "great white shark"] and task.templates == ["a photo of a {}"]
    counts = {"classes": 2, "prompts": 1}
    assert task.about == counts | {"prompt": "a photo of a {}", "prompt_source": "default: no templates.txt"}
    (tmp_path / "set" / "templates.txt").write_text("one {}\n")
    task = ZeroShotTask(of(tmp_path / "set"), **COMMON)
    assert task.templates == ["one {}"]
    assert task.about == counts | {"prompt": "one {}", "prompt_source": str(tmp_path / "set" / "templates.txt")}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        ZeroShotTask(of(tmp_path / "empty"), **COMMON).check()
