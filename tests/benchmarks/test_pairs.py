"""Data sets of benchmarks.pairs: captions of one image, planted duplicates, exchanged objects; whole studies."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.accuracy import main
from benchmarks.pairs import captions_of, exchanged, write_captioned
from benchmarks.rows import read
from infcl.data.demo import prepare_demo, train_pairs
from infcl.data.index import DEFAULT_KEYS
from infcl.data.streaming import stream_records
from infcl.data.tokenizer import Tokenizer

CONTEXT_LENGTH = 20  # of the demo model


def fail(cause: str, url: str, error: Exception) -> None:
    raise error


def test_each_image_has_five_captions_and_some_images_are_planted_more_often(tmp_path):
    count = 41
    write_captioned(prepare_demo(tmp_path / "demo", num_train=count), tmp_path / "captioned")
    shards = [str(tmp_path / "captioned" / "train" / "00000.tar")]
    records = [record for _, record in stream_records(shards, DEFAULT_KEYS, fail)]
    copies = Counter(record.image for record in records)
    assert len(copies) == count and Counter(copies.values()) == {5: 38, 25: 3}
    assert len({(record.image, record.text) for record in records}) == 5 * count
    tokenizer = Tokenizer(tmp_path / "captioned" / "tokenizer.model", CONTEXT_LENGTH)
    tokenizer([(record.text or b"").decode() for record in records])
    assert tokenizer.truncated == 0


def test_five_captions_of_a_picture_mean_the_same_and_exchanged_ones_do_not():
    def meaning(caption: str) -> set[str]:
        """The same words for a scene, from either of its objects."""
        captions = captions_of(caption)
        return {captions[0], captions[3]} if exchanged(caption) else {captions[0]}

    for _, caption, _ in train_pairs(300, 0):
        captions = captions_of(caption)
        assert len(set(captions)) == 5
        if exchanged(caption):
            assert all(meaning(other) == meaning(caption) for other in captions)
            assert all(meaning(exchanged(other) or "").isdisjoint(meaning(caption)) for other in captions)
    with pytest.raises(ValueError, match="the demo has no such caption: 'a cat'"):
        captions_of("a cat")


def test_objects_are_exchanged_in_scenes_alone():
    assert exchanged("there is a blue ring left of a red cross, all on grey") == (
        "there is a red cross left of a blue ring, all on grey"
    )
    assert exchanged("a handwritten two at top left, white on black") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "flags", "names"),
    [
        ("word-order", ["--steps", "1"], {"none-0", "exchanged-0"}),
        (
            "false-negatives",
            ["--batches", "64", "--samples", "64"],
            {"64-negative-0", "64-mask-0", "64-positive-0"},
        ),
    ],
)
def test_a_study_trains_and_writes_a_row_for_each_training(tmp_path: Path, study: str, flags: list[str], names: set):
    common = ["--out", str(tmp_path), "--work", str(tmp_path / "work"), "--num-train", "512", "--seeds", "1"]
    assert main(["--study", study, *common, "--jobs", "2", *flags]) == 0
    found = read(tmp_path / f"{study.replace('-', '_')}.csv")
    assert {row["run"] for row in found} == names
    if study == "word-order":
        assert all(row["scenes"] == 1024 and 0 <= row["word_order"] <= 1 for row in found)
    else:
        assert {row["run"]: row["duplicate_share"] != "" for row in found}["64-mask-0"]
