"""What an evaluation iterates over: shards, class folders and caption lists, every sample once and in order."""

import json
from collections import Counter

import pytest
import torch

from infcl.data import records
from infcl.data.index import MAX_IMAGE_BYTES
from infcl.data.table import TableColumns
from tests.lib.sample_kinds import EXECUTED, KINDS, write_kinds
from tests.lib.shard_files import encode, picture, write_shards, write_tar
from tests.lib.small_loader import eval_samples


def test_ranks_read_their_own_samples_of_shards_only(tmp_path, monkeypatch):
    folder, read, world_size = write_shards(tmp_path / "s", [7, 30, 0, 3, 1]), [], 4
    read_record = records._read_record
    monkeypatch.setattr(records, "_read_record", lambda *of: read.append(of) or read_record(*of))
    samples = list(eval_samples(folder, image_size=8))
    whole = [sample.caption for sample in samples]
    assert whole == [f"picture number {i}" for i in range(41)] and len(read) == 41
    assert [sample.metadata["number"] for sample in samples] == list(range(41)) and samples[0].key == "000000000"
    assert samples[0].image.shape == (3, 8, 8) and samples[0].image.dtype == torch.uint8
    for one, many in zip(samples, eval_samples(folder, image_size=8, threads=1), strict=True):
        assert one.key == many.key and torch.equal(one.image, many.image)
    read.clear()
    for rank in range(world_size):
        read.clear()
        own = [sample.caption for sample in eval_samples(folder, image_size=8, rank=rank, world_size=world_size)]
        assert own == whole[rank::world_size] and len(read) == len(own)


def test_class_folders_give_every_image_with_its_folders_name(tmp_path):
    hidden = (".cache/a.png", "n1/.ipynb_checkpoints/a.png", "n1/._a.png")  # no class and no images
    for name in ("n2/a.PNG", "n1/deep/b.jpg", "n1/a.png", "n1/notes.txt", *hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(picture(1), "JPEG" if name.endswith("jpg") else "PNG"))
    samples = list(eval_samples(str(tmp_path), image_size=8))
    assert [(sample.key.split("/")[-1], sample.metadata["label"]) for sample in samples] == [
        ("a.png", "n1"),
        ("b.jpg", "n1"),
        ("a.PNG", "n2"),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_ranks_share_a_table_and_an_image_that_is_missing_or_too_large_is_counted(tmp_path, kind):
    (tmp_path / "x.png").write_bytes(encode(picture(2)))
    with open(tmp_path / "hole.png", "wb") as hole:
        hole.truncate(MAX_IMAGE_BYTES + 1)
    images, data = ["x.png", "hole.png", "x.png", "gone.png", "x.png", "x.png"], tmp_path / f"c.{kind}"
    if kind == "csv":
        data.write_text("said,file\n" + "".join(f'"caption, {i}",{image}\n' for i, image in enumerate(images)))
        with pytest.raises(ValueError, match=r"c.csv has no columns 'filepath' and 'title' but \['said,file'\]"):
            eval_samples(str(data), image_size=8)
    else:
        lines = [{"image": image, "captions": [f"caption, {i}", "b"]} for i, image in enumerate(images)]
        data.write_text("\n".join(map(json.dumps, lines)))
    options = {"image_size": 8, "columns": TableColumns(",", "file", "said"), "world_size": 2}
    sets = [eval_samples(str(data), rank=rank, **options) for rank in range(2)]
    numbers = [[int(sample.caption.split()[1]) for sample in samples] for samples in sets]
    assert numbers == [[0, 2, 4], [5]]
    assert sets[1].skipped == {"missing_image_file": 1, "image_file_too_large": 1} and not sets[0].skipped


def test_a_caption_list_has_lines_where_its_json_has(tmp_path):
    """Not at the other separators that str.splitlines knows, which captions from the web contain."""
    captions = ["one\u2028two\x85three\u2029four", "b\u000bc"]
    lines = [{"image": "x.png", "captions": [caption]} for caption in captions]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "x.png").write_bytes(encode(picture(2)))
    with open(tmp_path / "c.jsonl", "ab") as file:
        file.write(b'\n{"image": "x.png", "captions": ["a\\ud800b"]}\n')  # a lone surrogate
    assert [sample.caption for sample in eval_samples(str(tmp_path / "c.jsonl"), image_size=8)] == [*captions, "a?b"]


def test_lines_that_are_no_samples_are_counted(tmp_path):
    (tmp_path / "x.png").write_bytes(encode(picture(2)))
    lines = [b'{"image": "x.png", "captions": ["x"]}', b"not json", b"", b'{"image": 3}', b'{"captions": [1]}', b"[1]"]
    lines += [b'{"image": "x.png"}', '{"image": "x.png", "captions": ["\u00e9"]}'.encode("latin-1")]
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    samples = eval_samples(str(tmp_path / "c.jsonl"), image_size=8)
    assert [sample.captions for sample in samples] == [["x"], [], ["?"]]
    assert samples.skipped == {"bad_row": 2, "no_image": 2}


def test_data_that_is_not_there_is_rejected_at_once(tmp_path):
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    for data, message in (
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path / "none.tar", "1 of 1 shards are missing"),
        (tmp_path / "pairs.CSV", "pairs.CSV: No such file"),
        (tmp_path / "empty", "neither .*shards nor class folders"),
    ):
        with pytest.raises(ValueError, match=message):
            eval_samples(str(data), image_size=8)


def test_damaged_shards_are_counted_by_the_first_rank_alone(tmp_path):
    good = write_tar(tmp_path / "0.tar", [("a.png", encode(picture(1))), ("a.txt", b"x")])
    (tmp_path / "1.tar").write_bytes(good.read_bytes()[:700])
    skipped = []
    for rank in range(2):
        samples = eval_samples(str(tmp_path), image_size=8, rank=rank, world_size=2)
        list(samples)
        skipped.append(samples.skipped.total())
    assert skipped[0] >= 1 and skipped[1] == 0


def test_evaluation_leaves_out_bad_images_and_json_and_keeps_samples_without_captions(tmp_path):
    samples, kinds = eval_samples(write_kinds(tmp_path), image_size=16), list(KINDS)
    without = {kinds[int(sample.key)] for sample in samples if not sample.caption}
    causes = {kind: cause.removeprefix("index/") for kind, (_, cause, _) in KINDS.items()}
    causes |= {"broken json next to text": "bad_json", "thin": ""}  # all json counts, and any shape of an image
    assert without == {kind for kind, cause in causes.items() if cause in ("empty_caption", "no_caption")}
    assert samples.skipped == Counter(cause for kind, cause in causes.items() if cause and kind not in without)
    assert not EXECUTED.exists()
