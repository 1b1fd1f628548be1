import csv
import shutil

import numpy as np
import pytest

from infcl.data.loader import TrainLoader
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
    assert reader.counts.tolist() == [7] and reader.found == {"index/bad_row": 1, "index/no_image": 1}


def test_images_are_found_beside_the_table_though_its_first_is_gone_and_none_at_all_is_rejected(table, tmp_path):
    lines = table.read_text().replace("images/0.png", "images/gone as well.png")
    table.write_text(lines)
    assert TableReader(str(table)).read(np.array([4]))[0].image == encode(picture(4))
    table.write_text(lines.replace("images/", "pictures/"))
    with pytest.raises(ValueError, match=r"t.csv: none of its first 7 images is there \(the first: 'pictures/gone as"):
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


def test_a_table_is_data_and_runs_nothing(tmp_path, monkeypatch):
    # From a folder of its own: whether ../../etc/hostname is there must not depend on where the clone is.
    work = tmp_path / "two" / "levels"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hostname").write_text("not an image\n")
    (tmp_path / "t.csv").write_bytes(
        b"filepath\ttitle\npipe:touch %s/executed\tx\n" % str(tmp_path).encode()
        + b"../../etc/hostname\tx\n\x00\xff\tx\n"
        + b"x.png\t"
        + b"long " * 100_000
        + b"\n"
    )
    records = TableReader(str(tmp_path / "t.csv")).read(np.arange(4))
    assert [record.fault.cause for record in records[::2]] == ["missing_image_file"] * 2
    assert len(records[3].text) == 500_000 and not (tmp_path / "executed").exists()


def test_several_tables_have_upsampling_factors(table, tokenizer):
    loader = make(f"{table}::{table}", tokenizer, upsampling_factors=[1, 2.5])
    assert loader.num_samples == 7 + 14 + 4  # round(3.5) is even
    with pytest.raises(ValueError, match="2 sources need as many"):
        TableReader(f"{table}::{table}", factors=[1])


def test_a_quote_that_nothing_closes_is_told_with_what_it_took(tmp_path):
    path = tmp_path / "t.csv"
    rows = [
        "a://0.jpg\tzero",
        'a://1.jpg\t"5 inch nail',
        "a://2.jpg\ttwo",
        'a://3.jpg\t"quoted" dog',
        "a://4.jpg\tfour",
    ]
    rows += ['a://5.jpg\t"two lines,\nof them a://x.jpg', 'one"', "a://6.jpg\tsix"]
    path.write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    reader = TableReader(str(path))
    texts = [record.text.decode() for record in reader.read(np.arange(int(reader.counts.sum())), images=False)]
    assert texts == ["zero", "four", "two lines,\nof them a://x.jpg\none", "six"]
    assert reader.found == {"index/unclosed_quote": 3}
    assert len(reader.warnings) == 1 and "t.csv, lines 3 to 5: one quoted field contains" in reader.warnings[0]
    path.write_text("\n".join(["filepath\ttitle", *rows[:3]]))
    with pytest.raises(ValueError, match="t.csv, line 3: a quote opens there, or in the 2 lines from there to the end"):
        TableReader(str(path))


@pytest.mark.parametrize("name", ["images/{}.PNG", "a://host/{}?size=9"])
def test_rows_after_a_stray_quote_are_found(tmp_path, name):
    """Else the caption would be a part of this row's and of the next one's, and the image this row's."""
    (tmp_path / "images").mkdir()
    rows = []
    for i in range(5):
        (tmp_path / "images" / f"{i}.PNG").write_bytes(encode(picture(i)))
        rows.append(f"{name.format(i)},{i}")
    rows[1:3] = [f'{name.format(1)},"5 inch nail', f'{name.format(2)},"a dog, running"']
    rows[3] = f'{name.format(3)},"two lines,\nnot, a row"'
    (tmp_path / "t.csv").write_text("\n".join(["filepath,title", *rows]) + "\n")
    reader = TableReader(str(tmp_path / "t.csv"), columns=TableColumns(","))
    texts = [record.text.decode() for record in reader.read(np.arange(int(reader.counts.sum())), images=False)]
    assert texts == ["0", "two lines,\nnot, a row", "4"] and reader.found == {"index/unclosed_quote": 2}


def test_a_table_that_lies_elsewhere_is_the_same_data(table, tmp_path, monkeypatch):
    """A run is continued only with the data that it began with."""
    here, copy = TableReader(str(table)).sha256, tmp_path / "copy"
    shutil.copytree(table.parent, copy, ignore=lambda *_: ["copy"])
    monkeypatch.chdir(copy)
    assert TableReader(str(copy / "t.csv")).sha256 == TableReader("t.csv").sha256 == here
    (copy / "t.csv").write_text(table.read_text().replace("number 4", "number 5"))
    assert TableReader("t.csv").sha256 != here


def test_lines_of_a_field_that_is_too_long_are_all_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("infcl.data.table.MAX_LINE", 40)
    rows = ['a://1.jpg\t"' + "long " * 4, "a://2.jpg\t" + "long " * 4, "a://3.jpg\tthree"]
    (tmp_path / "t.csv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    reader = TableReader(str(tmp_path / "t.csv"))
    assert reader.counts.tolist() == [1] and reader.found == {"index/bad_row": 2}
