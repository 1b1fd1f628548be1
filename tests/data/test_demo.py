import hashlib
import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest

from infcl.data import demo
from infcl.data.shards import load_manifest
from infcl.data.tokenizer import Tokenizer
from tests.lib.small_loader import eval_samples


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The data set of the command, and what the command and its repetition print."""
    folder, output = tmp_path_factory.mktemp("demo") / "data", io.StringIO()
    with redirect_stdout(output):
        for _ in range(2):
            demo.main(["--out", str(folder), "--num-train", "600", "--seed", "3"])
    return folder, output.getvalue()


@pytest.fixture
def folder(written):
    return written[0]


def test_the_command_writes_a_folder_once_and_reuses_it(written):
    folder, output = written
    assert output.count("600 training pairs in 8 shards") == 2
    assert output.count("written in") == output.count("there already") == 1
    assert [p.name for p in folder.parent.iterdir()] == ["data"]  # no temporary folder stays
    assert json.loads((folder / "demo.json").read_text())["num_train"] == 600
    (picture, _, _), (other, _, _) = (next(demo.train_pairs(600, seed)) for seed in (3, 4))
    assert (picture != other).any()


def test_the_layout_is_the_documented_one(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".idx"]
    assert sorted(str(path.relative_to(folder)) for path in files) == sorted(
        [f"train/{i:05d}.tar" for i in range(8)]
        + ["val/00000.tar", "val/00001.tar", "zeroshot/00000.tar"]
        + ["zeroshot/classnames.txt", "zeroshot/templates.txt", "tokenizer.model", "demo.json"]
    )
    sizes = [shard.samples for shard in load_manifest(str(folder / "train")).shards]
    assert sum(sizes) == 600 and len(set(sizes)) == 8
    classnames = (folder / "zeroshot/classnames.txt").read_text().splitlines()
    templates = (folder / "zeroshot/templates.txt").read_text().splitlines()
    assert classnames[7] == "seven" and len(classnames) == 10
    assert len(templates) == 8 and all(template.count("{}") == 1 for template in templates)


def test_any_other_folder_is_left_alone(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="holds a demo data set of .*600.*remove it, or use another"):
        demo.prepare_demo(folder, num_train=601, seed=3)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        demo.prepare_demo(tmp_path)
    with pytest.raises(SystemExit):
        demo.main(["--out", str(folder), "--num-train", "5"])
    assert f"error: {folder} holds a demo data set of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path / "mine.txt")])
    assert "mine.txt: Not a directory" in capsys.readouterr().err


def test_held_out_digits_are_never_trained_on(folder):
    bitmaps, labels, training, held_out = demo.load_digits()
    assert bitmaps.shape == (1797, 8, 8) and len(training) == 1397 and len(held_out) == 400
    assert not set(training) & set(held_out) and np.bincount(labels[held_out]).tolist() == [40] * 10
    trained = {s.metadata.get("digit") for s in eval_samples(str(folder / "train"), image_size=32)} - {None}
    tested = [sample.metadata for sample in eval_samples(str(folder / "zeroshot"), image_size=32)]
    assert trained <= set(training.tolist())
    assert {sample["digit"] for sample in tested} == set(held_out.tolist()) and len(tested) == 400
    assert all(labels[sample["digit"]] == sample["label"] for sample in tested)
    as_bytes = {bitmaps[i].tobytes() for i in training}
    assert not any(bitmaps[i].tobytes() in as_bytes for i in held_out)


def test_held_out_scenes_are_never_trained_on_and_can_be_told_apart():
    held_out, training = demo._compositions(3)
    assert len(held_out) == demo.VAL_SCENES and not set(held_out) & set(training)
    assert len(set(held_out)) + len(set(training)) == 30 * 29 * 2 * 4
    bags = {(*sorted((a[0], b[0])), *sorted((a[1], b[1])), background) for (a, b), _, background in held_out}
    assert len(bags) == demo.VAL_SCENES  # colours, shapes and background suffice


def test_validation_captions_are_unique_and_fit_the_context(folder):
    captions = [sample.caption for sample in eval_samples(str(folder / "val"), image_size=32)]
    assert len(set(captions)) == len(captions) == 1024
    tokenizer = Tokenizer(folder / "tokenizer.model", context_length=20)
    tokens = tokenizer(captions)
    assert tokenizer.vocab_size == demo.VOCAB_SIZE and tokenizer.truncated == 0 and 2 not in tokens
    assert len({tuple(row) for row in tokens.tolist()}) == 1024


def test_pixels_never_change_between_releases():
    """A golden sum: published figures of the demo refer to these pictures."""
    pictures = [picture for picture, _, _ in demo.train_pairs(40, 0)]
    assert hashlib.sha256(np.stack(pictures).tobytes()).hexdigest()[:16] == "da2f6c9c6d785821"
