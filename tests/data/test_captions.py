"""Several captions of an image, hard negatives, and ids of samples that are the same."""

import json
from pathlib import Path

import pytest
import torch

from infcl.config import TrainConfig
from infcl.data.captions import decode_captions
from infcl.data.evaluation import EvalConfig
from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.loader import open_collection
from infcl.data.records import BadSample, Record
from infcl.data.samples import SampleTexts
from infcl.data.tokenizer.learn import captions_of
from infcl.evaluate.tasks import RetrievalTask
from tests.lib.shard_files import encode, picture, write_tar
from tests.lib.small_loader import small_loader

CAPTIONS = [f"picture number {i}" for i in range(5)]


def write_samples(folder: Path, samples: list[tuple[int, dict]]) -> str:
    """Write (number of the picture, json) of each sample to a shard; return the folder as a URL."""
    write_tar(folder / "0.tar", [
        (f"{i:02d}.{extension}", data)
        for i, (number, values) in enumerate(samples)
        for extension, data in (("png", encode(picture(number))), ("json", json.dumps(values).encode()))
    ])  # fmt: skip
    return str(folder)


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    monkeypatch.setattr("infcl.data.samples._BAD_IN_A_ROW", 100)  # data without any usable sample ends soon


@pytest.fixture
def shards(tmp_path):
    """Twelve images of three different pictures, with 1, 3 or 5 captions in json."""
    others = {"hard": ["number", "json"]}
    samples = [(i % 3, {"caption": CAPTIONS[: 1 + 2 * (i % 3)], "group": i // 4, **others}) for i in range(12)]
    return write_samples(tmp_path, samples)


def epoch(loader) -> list[dict[str, torch.Tensor]]:
    return [batch for step in loader for batch in step]


def test_a_text_else_the_entries_of_the_first_json_key_with_text_are_captions(tmp_path):
    def of(text: bytes | None, metadata: dict | None = None, keys: SampleKeys = DEFAULT_KEYS, **options) -> list[str]:
        return decode_captions(Record(None, text, json.dumps(metadata or {}).encode(), "here"), keys, **options)[0]

    assert of(b"a cat\r\n\n?!\na dog\n") == ["a cat\r\n\n?!\na dog\n"]
    assert of(b"a cat\r\n\n?!\na dog\n", lines=True) == ["a cat", "a dog"]
    assert of("\ufeffa cat\na dog".encode(), lines=True) == ["a cat", "a dog"]
    assert of(b"a text", {"caption": "b"}) == ["a text"] and of(None, {"caption": ["a", " ", 3, "b"]}) == ["a", "b"]
    keys = SampleKeys(json_text="long;short")
    assert of(b"x", {"long": "a", "short": "b"}, keys) == ["a"]
    for nothing in ({}, {"long": []}, {"long": " "}):
        assert of(b"x", {**nothing, "short": "b"}, keys) == ["b"]
    with pytest.raises(BadSample, match="no text under 'long;short' .a JSON int is under 'long'.; texts: none"):
        of(b"x", {"long": 3}, keys)


@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_training_evaluation_and_tokenizer_use_the_same_captions_of_a_text_of_several_lines(tmp_path, tokenizer, kind):
    text, data = "a cat\nsits on\na mat", tmp_path / ("t.csv" if kind == "csv" else "0.tar")
    (tmp_path / "0.png").write_bytes(encode(picture(0)))
    if kind == "csv":
        data.write_text(f'filepath\ttitle\n0.png\t"{text}"\n')
    else:
        write_tar(data, [("0.png", encode(picture(0))), ("0.txt", text.encode())])
    training = TrainConfig(train_data=str(data))
    assert list(captions_of(open_collection(training), 9)) == [text]
    for captions, wanted in (("one", [text]), ("lines", text.splitlines())):
        texts = SampleTexts(lines=captions == "lines")
        loader = small_loader(str(data), tokenizer, dataset_type=training.dataset_type, texts=texts)
        drawn = {tuple(batch["texts"][0].tolist()) for _ in range(20) for batch in epoch(loader)}
        assert drawn == {tuple(row) for row in tokenizer(wanted).tolist()}
        config = EvalConfig(data=str(data), image_size=8, captions=captions)
        task = RetrievalTask(config, tokenizer=tokenizer, batch_size=1)
        assert [task.target(sample) for sample in task.source()] == [wanted]


def test_captions_are_drawn_by_the_plan_and_a_resume_draws_the_same(shards, tokenizer):
    options = {"texts": SampleTexts(captions=3), "micro_batch_size": 2}
    loader = small_loader(shards, tokenizer, **options)
    first, second = epoch(loader), epoch(loader)
    known = {tuple(row) for row in tokenizer(CAPTIONS).tolist()}
    for batch in first:
        assert batch["texts"].shape == (6, 12) and batch["images"].shape[0] == 2
        for sample, texts in zip(batch["ids"].tolist(), batch["texts"].view(2, 3, -1).tolist()):
            drawn = {tuple(row) for row in texts}
            assert drawn <= known and len(drawn) == min(3, 1 + 2 * (sample % 3))
    assert any(not torch.equal(a["texts"], b["texts"]) for a, b in zip(first, second))
    resumed = small_loader(shards, tokenizer, workers=1, **options)
    resumed.set_position(1, 2)
    for wanted, got in zip(second[2:], epoch(resumed), strict=True):
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_a_hard_negative_follows_the_captions_of_its_image(shards, tokenizer):
    texts = SampleTexts(captions=2, negatives="hard")
    batches = epoch(small_loader(shards, tokenizer, texts=texts, micro_batch_size=3))
    rows = torch.cat([batch["texts"].view(3, 3, -1)[:, 2] for batch in batches])
    assert {tuple(row) for row in rows.tolist()} == {tuple(row) for row in tokenizer(["number", "json"]).tolist()}


@pytest.mark.parametrize(
    ("captions", "hard", "noted"),
    [
        (["a", "b"], ["a", "c"], 24),  # one of its captions, drawn or not
        (["a", "b"], ["b", "c"], 24),
        (["picture number"], ["Picture,  NUMBER!", "c"], 24),  # differs only in case, punctuation and white space
        (["a\nb"], ["b", "c"], 24),  # a line of it
        (["a 1.5"], ["c 15"], 0),
        (["a"], ["A!", "a"], None),
    ],
)
def test_a_hard_negative_is_never_a_caption_of_its_image(tmp_path, tokenizer, captions, hard, noted):
    urls = write_samples(tmp_path, [(0, {"caption": captions, "hard": hard})] * 24)
    loader = small_loader(urls, tokenizer, texts=SampleTexts(negatives="hard"), micro_batch_size=4)
    if noted is None:
        with pytest.raises(RuntimeError, match="negative_is_caption: .*all texts under 'hard'"):
            epoch(loader)
        return
    rows = [row for batch in epoch(loader) for row in batch["texts"].view(4, 2, -1)[:, 1].tolist()]
    assert rows == tokenizer([hard[-1]]).tolist() * 24
    assert loader.report().get("noted/negative_is_caption", 0) == noted


def test_by_caption_a_hard_negative_has_the_id_of_the_images_it_describes(tmp_path, tokenizer):
    samples = [{"caption": f"picture number {i}", "hard": f"Picture, number {(i + 1) % 4}"} for i in range(3)]
    urls = write_samples(tmp_path, [*enumerate(samples)])
    for same, width in (("caption", 2), ("image", 1)):
        texts = SampleTexts(negatives="hard", same=same)
        (batch,) = epoch(small_loader(urls, tokenizer, texts=texts, micro_batch_size=3))
        ids = dict(zip(batch["ids"].tolist(), batch["same_ids"].tolist()))
        assert batch["same_ids"].shape == (3, width) and len({row[0] for row in ids.values()}) == 3
        if same == "caption":
            assert (ids[0][1], ids[1][1]) == (ids[1][0], ids[2][0])
            assert ids[2][1] not in {row[0] for row in ids.values()}


@pytest.mark.parametrize("same, classes", [("image", 3), ("key:group", 3), ("caption", 1)])
def test_samples_that_are_the_same_have_one_id(shards, tokenizer, same, classes):
    keys = SampleKeys(json_text="first") if same == "caption" else SampleKeys()
    if same == "caption":
        write_samples(Path(shards), [(i, {"first": "one  caption"}) for i in range(12)])
    batches = epoch(small_loader(shards, tokenizer, keys=keys, texts=SampleTexts(same=same), micro_batch_size=4))
    of = {int(n): int(same_id) for batch in batches for n, same_id in zip(batch["ids"], batch["same_ids"])}
    assert len(of) == 12 and len(set(of.values())) == classes and min(of.values()) >= 0
    if same != "caption":
        group = {n: n % 3 if same == "image" else n // 4 for n in of}
        assert all((of[a] == of[b]) == (group[a] == group[b]) for a in of for b in of)
    plain = small_loader(shards, tokenizer, keys=keys, micro_batch_size=4)
    assert "same_ids" not in epoch(plain)[0]


def test_a_sample_without_the_key_is_skipped_and_counted(shards, tokenizer):
    for texts, message in (
        (SampleTexts(same="key:gone"), "no_key: .*json has nothing under 'gone'"),
        (SampleTexts(negatives="gone"), "no_negative: .*json has no text under 'gone'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            epoch(small_loader(shards, tokenizer, texts=texts, max_bad_fraction=1.0))
    with pytest.raises(ValueError, match="csv tables have no json"):
        small_loader("t.csv", tokenizer, dataset_type="csv", texts=SampleTexts(same="key:x"))
