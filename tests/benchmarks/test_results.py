"""The docs show what the raw files in docs/results say: drawing them again changes nothing."""

import pytest

from benchmarks import results
from benchmarks import rows as rows_module
from benchmarks.results import CHARTS, RESULTS, TABLES, digest, digest_of, fill, pages, regions
from benchmarks.rows import append, rows


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_drawing_a_page_again_changes_nothing(page):
    text = page.read_text()
    assert fill(text) == text, f"{page.name} differs from docs/results: make results"


def test_each_table_stands_on_one_page():
    shown = [name for page in pages() for name in regions(page.read_text())]
    assert sorted(shown) == sorted(TABLES)


@pytest.mark.parametrize("picture", CHARTS)
def test_a_chart_shows_the_raw_results(picture):
    assert digest_of(RESULTS / picture) == digest(CHARTS[picture].panels()), f"docs/results/{picture}: make results"


def test_a_region_is_filled_on_any_page_and_the_rest_stays():
    page = "a\n<!-- results: one -->\nold\nold\n<!-- end -->\nb\n<!-- results: two -->\n<!-- end -->\n"
    filled = fill(page, {"one": lambda: "new", "two": lambda: "more\n"})
    assert filled == "a\n<!-- results: one -->\nnew\n<!-- end -->\nb\n<!-- results: two -->\nmore\n<!-- end -->\n"
    with pytest.raises(ValueError, match="no table fills the region 'two'; there are one"):
        fill(page, {"one": lambda: "new"})
    with pytest.raises(ValueError, match="no <!-- end -->"):
        fill("<!-- results: one -->\n")


@pytest.mark.parametrize("name", TABLES)
def test_no_table_has_a_line_twice_or_of_another_width(name):
    parts = [part.splitlines() for part in TABLES[name]().split("\n\n") if part.startswith("|")]
    for lines in parts:
        assert len(set(lines)) == len(lines) > 2
        assert len({line.count(" | ") for line in lines}) == 1


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A function that appends rows to a file in place of docs/results."""
    monkeypatch.setattr("benchmarks.rows.RESULTS", tmp_path)
    return lambda name, rows: append(tmp_path / name, rows, list(dict.fromkeys(key for row in rows for key in row)))


def test_numbers_are_read_as_such_and_commits_are_not(store):
    store("a.csv", [{"commit": "6e15030", "version": "3.10", "gpus": 4, "ms": 1.5, "text": ""}])
    assert rows("a.csv") == [{"commit": "6e15030", "version": "3.10", "gpus": 4, "ms": 1.5, "text": ""}]
    with pytest.raises(FileNotFoundError, match="b.csv"):
        rows("b.csv")


def test_a_table_of_losses_shows_the_last_commit_of_each_setting(store):
    common = {"gpus": 1, "dim": 768, "global_batch": 1024, "extra_mib": 9.0, "ratio_to_cublas": 0.5}
    common |= {"repeats": 1, "std_ms": 0.0, "device": "h", "torch": "t"}
    times = [("inf_cl", "a", 40.0), ("clip", "a", 60.0), ("inf_cl", "b", 50.0), ("inf_cl", "a", 41.0)]
    stored = [common | {"impl": impl, "commit": commit, "median_ms": time} for impl, commit, time in times]

    def shown(*more: dict) -> str:
        (rows_module.RESULTS / "loss_h200.csv").unlink(missing_ok=True)
        store("loss_h200.csv", [*stored, *more])
        return results.loss_table(1, "inf_cl", "clip")().splitlines()[-3]

    assert shown() == "| 1,024 | 41.0 ms, 9 MiB | 60.0 ms, 9 MiB | 0.50 |"  # 40 and 41 are within 3%
    stored[-1]["median_ms"] = 44.0
    assert "| 40.0-44.0 ms, 9 MiB |" in shown()
    again = stored[2] | {"commit": "c", "extra_mib": 8.0, "repeats": 2, "std_ms": 0.31}
    assert "| 50.0 +- 0.31 ms, 8 MiB |" in shown(again)
    failed = stored[2] | {"commit": "d", "median_ms": "", "ratio_to_cublas": ""}
    assert shown(again, failed) == "| 1,024 | x | 60.0 ms, 9 MiB |  |"


def test_differences_of_losses_are_taken_seed_by_seed(store):
    store("accuracy_losses.csv", [
        {"loss": loss, "seed": seed, **dict.fromkeys(results.METRICS, 0.1 * seed + shift)}
        for loss, shift in (("clip", 0.0), ("inf_cl", 0.02))
        for seed in range(3)
    ])  # fmt: skip
    assert "| infcl - CLIP | +0.020 +- 0.000 |" in results.trained_pairs()
    assert "| standard deviation of CLIP over seeds | 0.100 |" in results.trained_pairs()
