import csv
import json
import os
import shutil

import numpy as np
import pytest

from infcl.data.captions import decode_captions
from infcl.data.loader import TrainLoader
from infcl.data.pack import main
from infcl.data.records import ShardReader
from infcl.data.samples import SampleTexts
from infcl.data.shards import load_manifest
from infcl.data.table import TableColumns, TableReader
from tests.lib.shard_files import encode, picture
from tests.lib.small_loader import small_loader


@pytest.fixture
def table(tmp_path):
    """Seven rows: five good ones, a missing image, a web page; and two lines that are no rows."""
    (tmp_path / "images").mkdir()
    with open(tmp_path / "t.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["number", "title", "filepath"])
        for i in range(5):
            (tmp_path / "images" / f"{i}.png").write_bytes(encode(picture(i)))
            writer.writerow([i, f'picture number {i},\nquoted "{i}"', f"images/{i}.png"])
        (tmp_path / "images" / "page.png").write_bytes(b"<html>")
        writer.writerows([[5, "gone", "images/gone.png"], [6, "a page", "images/page.png"], ["7"], [8, "no path", ""]])
    return tmp_path / "t.csv"


def make(path, tokenizer, **options) -> TrainLoader:
    return small_loader(str(path), tokenizer, max_bad_fraction=1.0, dataset_type="csv", **options)


def test_a_table_is_read_by_row_number(table):
    reader = TableReader(str(table))
    records = reader.read(np.array([4, 0, 5]))
    assert [record.text for record in records[:2]] == [
        b'picture number 4,\nquoted "4"',
        b'picture number 0,\nquoted "0"',
    ]
    assert records[0].image == encode(picture(4)) and records[0].fault is None
    assert records[2].fault.cause == "missing_image_file" and "images/gone.png" in records[2].where
    twice = TableReader(f"{table}::{table}", factors=[1, 2.5])
    assert twice.counts.tolist() == [7, 7] and twice.factors.tolist() == [1, 2.5]
    assert twice.read(np.array([11]))[0].text == records[0].text
    with pytest.raises(ValueError, match="2 sources need as many"):
        TableReader(f"{table}::{table}", factors=[1])
    assert reader.counts.tolist() == [7] and reader.found == {"index/bad_row": 1, "index/no_image": 1}


def test_relative_paths_start_at_the_table_whatever_is_in_the_working_directory(table, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "images").mkdir(parents=True)
    (tmp_path / "elsewhere" / "images" / "0.png").write_bytes(encode(picture(99)))
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (str(table), "../t.csv"):
        records = TableReader(path).read(np.arange(5))
        assert [record.image for record in records] == [encode(picture(i)) for i in range(5)]
    (here,) = TableReader(str(table), columns=TableColumns(root=".")).read(np.array([0]))
    assert here.image == encode(picture(99))
    table.write_text(table.read_text().replace("images/0.png", f"file://{tmp_path}/elsewhere/images/0.png"))
    assert TableReader(str(table)).read(np.array([0]))[0].image == encode(picture(99))


def test_a_table_of_which_no_image_exists_is_rejected(table, tmp_path):
    lines = table.read_text().replace("images/0.png", "images/gone as well.png")
    table.write_text(lines)
    assert TableReader(str(table)).read(np.array([4]))[0].image == encode(picture(4))
    table.write_text(lines.replace("images/", "pictures/"))
    with pytest.raises(
        ValueError, match=r"t.csv: none of its first 7 images exists \(the first: '.*/pictures/gone as.*--csv-img-root"
    ):
        TableReader(str(table))


def test_an_epoch_over_a_table_uses_every_good_row(table, tokenizer):
    loader = make(table, tokenizer)
    used = [int(batch["ids"]) for (batch,) in loader]
    assert set(used) == set(range(5)) and len(used) == 7
    report = loader.report()
    assert report["skipped/missing_image_file"] >= 1 and report["skipped/not_an_image"] >= 1
    workers = make(table, tokenizer, workers=1)
    workers.set_position(0, 2)
    assert [int(batch["ids"]) for (batch,) in workers] == used[2:]


def test_columns_and_separator_can_be_named(table, tmp_path, tokenizer):
    typed = TableColumns(r"\t")  # as '\t' in a shell
    assert TableReader(str(table), columns=typed).sha256 == TableReader(str(table)).sha256
    text = table.read_text().replace("\t", ";").replace("title", "text").replace("filepath", "file")
    other = table.with_name("other.csv")
    other.write_text(text)
    columns = TableColumns(";", "file", "text")
    assert TableReader(str(other), columns=columns).sha256 == TableReader(str(table)).sha256
    with pytest.raises(
        ValueError, match=r"no columns 'filepath' and 'title' but \['number;text;file'\]: set --csv-img"
    ):
        TableReader(str(other))
    other.write_text("filepath\ttitle\n")
    with pytest.raises(ValueError, match="1 table holds 0 rows: a table has a line of column names"):
        make(other, tokenizer)
    with pytest.raises(ValueError, match="one character"):
        TableReader(str(other), columns=TableColumns("::"))
    with pytest.raises(ValueError, match="No such file"):
        TableReader(str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match="http://a/t.csv: download it"):
        TableReader("http://a/t.csv")


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("zip://x.jpg::/tmp/x.zip", "unsupported_url"),
        ("dir://x", "unsupported_url"),
        ("filecache::http://x/a.jpg", "unsupported_url"),
        ("s3://bucket/x::zip://y", "unsupported_url"),
        ("http://[::1", "unsupported_url"),
        ("http:///x.jpg", "missing_image_file"),
        ("https://me:hunter2@127.0.0.1/x.png", "url_rejected"),
        ("pipe:touch executed", "missing_image_file"),
        ("\x00\udcff", "missing_image_file"),
    ],
)
def test_a_row_with_any_other_url_is_a_bad_sample_that_runs_nothing_and_shows_no_password(
    table, url, cause, tmp_path, monkeypatch
):
    monkeypatch.setattr("infcl.data.storage.BACKOFF", 0.0)
    monkeypatch.chdir(tmp_path)
    table.write_bytes(table.read_bytes().replace(b"images/gone.png", os.fsencode(url)))
    (record,) = TableReader(str(table)).read(np.array([5]))
    assert record.fault.cause == cause and "hunter2" not in str(record.fault)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "rows, texts, bad",
    [
        (["0", '"5 inch nail', "2", '"quoted" dog', "4", '"two lines,\nof them a://x.jpg\none"', "6"], "0 4 two 6", 3),
        (["0", '"5 inch nail', "2"], "0", 2),  # the quote is never closed
        (["0", "one\tin two cells", "2\t", "3"], "0 2 3", 1),
        (['"two ""quoted"" words"', '"' + 120_000 * "long ", "2", 120_000 * "long ", "4"], "two 2 4", 2),  # per field
    ],
)
def test_a_stray_quote_or_separator_and_an_endless_field_cost_their_lines_and_are_counted(tmp_path, rows, texts, bad):
    """Else a caption would be a part of its row's and of the next one's. The header is as Excel writes it."""
    lines = [f"a://{i}.jpg\t{text}" for i, text in enumerate(rows)]
    (tmp_path / "t.csv").write_text("\n".join(['\ufeff"filepath"\t"title"', *lines]) + "\n")
    reader = TableReader(str(tmp_path / "t.csv"))
    records = reader.read(np.arange(int(reader.counts.sum())), images=False)
    assert [record.text.decode().split()[0] for record in records] == texts.split()
    assert reader.found == {"index/bad_row": bad}


def test_a_table_that_lies_elsewhere_is_the_same_data(table, tmp_path, monkeypatch):
    """A run is continued only with the data that it began with."""
    here, copy = TableReader(str(table)).sha256, tmp_path / "copy"
    shutil.copytree(table.parent, copy, ignore=lambda *_: ["copy"])
    monkeypatch.chdir(copy)
    assert TableReader(str(copy / "t.csv")).sha256 == TableReader("t.csv").sha256 == here
    (copy / "t.csv").write_text(table.read_text().replace("number 4", "number 5"))
    assert TableReader("t.csv").sha256 != here


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_line_without_an_end_is_no_table(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.write(b"filepath\ttitle\n" if name == "t.csv" else b"")
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match=f"{name}: a line of more than 16 MB"):
        TableReader(str(tmp_path / name))


def test_a_jsonl_trains_as_a_table_with_lists_of_captions_and_keys(table, tokenizer):
    lines = [
        {"image": "images/0.png", "caption": "picture number 0", "label": 3},
        {"image": "images/1.png", "captions": ["picture number 1", "picture number 2"], "label": 4},
        {"caption": "no image"},
    ]
    path = table.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n[1]\n{broken\n")
    loader = make(path, tokenizer, micro_batch_size=2, texts=SampleTexts(captions=2, same="key:label"))
    assert loader.report() == {"samples": 0, "index/no_image": 1, "index/bad_row": 2}
    ((batch,),) = list(loader)
    expected = {0: ["picture number 0"] * 2, 1: ["picture number 1", "picture number 2"]}
    for i, number in enumerate(batch["ids"].tolist()):
        texts = batch["texts"][2 * i : 2 * i + 2].tolist()
        assert sorted(texts) == sorted(tokenizer(expected[number]).tolist())
    assert len(set(batch["same_ids"].flatten().tolist())) == 2


@pytest.mark.parametrize("kind", ["folder", "csv", "jsonl"])
def test_packed_shards_hold_the_images_as_they_are_with_their_captions(table, tmp_path, kind, capsys):
    for i in range(5):
        (tmp_path / "images" / f"{i}.txt").write_text(f"number {i}")
    (tmp_path / "images" / "folder.png").mkdir()
    (tmp_path / "images" / "broken link.png").symlink_to("/no/such/image")
    rows = [{"image": f"images/{i}.png", "caption": f"number {i}"} for i in range(5)]
    rows += [{"image": "images/gone.png"}, {"image": "images/page.png", "caption": "a page"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"folder": tmp_path / "images", "csv": table, "jsonl": tmp_path / "t.jsonl"}[kind]
    for out in ("a", "b"):
        main(["pack", str(source), "--out", str(tmp_path / out), "--per-shard", "2"])
    printed = capsys.readouterr().out
    left_out = "missing_image_file: 1\n  left out, no_caption: 1\n  left out, not_a_file: 1"
    assert "5 samples in 3 shards" in printed and (left_out if kind == "folder" else "image_format: 1") in printed
    first, second = ([path.read_bytes() for path in sorted((tmp_path / out).glob("*.tar"))] for out in "ab")
    assert first == second
    records = ShardReader(load_manifest(str(tmp_path / "a"))).read(np.arange(5))
    numbers = [int(decode_captions(record)[0][0].split("number ")[1][0]) for record in records]
    assert sorted(numbers) == list(range(5))
    assert [record.image for record in records] == [encode(picture(number)) for number in numbers]
    with pytest.raises(SystemExit):
        main(["pack", str(source), "--out", str(tmp_path / "a")])
    assert "has shards already" in capsys.readouterr().err
