"""docs/ shows what the raw results under docs/results say: rendering them again changes nothing."""

import pytest

from benchmarks.paper import memory
from benchmarks.paper.__main__ import DOCS, FIGURES, PAGES, REGIONS
from benchmarks.paper.accuracy import table_3_pairs
from benchmarks.paper.draw import digest, digest_of, draw
from benchmarks.paper.raw import markdown, mean_and_deviation, rows
from benchmarks.paper.regions import fill, names
from benchmarks.paper.towers import measured_steps, steps


@pytest.mark.parametrize("page", PAGES)
def test_rendering_a_page_again_changes_nothing(page):
    text = (DOCS / page).read_text()
    assert names(text)
    assert fill(text, REGIONS) == text, f"docs/{page} is not what docs/results says: make results"


@pytest.mark.parametrize("picture", FIGURES)
def test_a_plot_shows_the_raw_results(picture):
    panels = FIGURES[picture][0]()
    if any(panels.values()):
        assert digest_of(DOCS / "results" / picture) == digest(panels), f"docs/results/{picture}: make results"


def test_every_region_is_shown_somewhere():
    shown = {name for page in PAGES for name in names((DOCS / page).read_text())}
    assert shown == set(REGIONS)


def test_a_region_is_filled_and_what_lies_around_it_stays():
    page = "a\n<!-- results: one -->\nold\nold\n<!-- end -->\nb\n<!-- results: two -->\n<!-- end -->\n"
    filled = fill(page, {"one": lambda: "new", "two": lambda: "more\n"})
    assert filled == "a\n<!-- results: one -->\nnew\n<!-- end -->\nb\n<!-- results: two -->\nmore\n<!-- end -->\n"
    with pytest.raises(ValueError, match="no function fills the region 'two'; there are one"):
        fill(page, {"one": lambda: "new"})
    with pytest.raises(ValueError, match="no <!-- end -->"):
        fill("<!-- results: one -->\n", {"one": lambda: "new"})


def test_a_plot_carries_the_digest_of_its_data(tmp_path):
    panels = {"a": {"infcl": [(1024, 1.0), (2048, 2.0)]}}
    draw(panels, tmp_path / "plot.png", x=("pairs",), y="ms")
    assert digest_of(tmp_path / "plot.png") == digest(panels)
    assert digest(panels) != digest({"a": {"infcl": [(1024, 1.0), (2048, 2.1)]}})
    assert digest_of(tmp_path / "none.png") is None


def test_numbers_are_read_as_such_and_commits_are_not(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("commit,gpus,ms,said\n6e15030,4,1.5,\n")
    monkeypatch.setattr("benchmarks.paper.raw.RESULTS", tmp_path)
    assert rows("a.csv", "none.csv") == [{"commit": "6e15030", "gpus": 4, "ms": 1.5, "said": ""}]


def test_means_and_paired_differences(monkeypatch):
    assert mean_and_deviation([1.0, 2.0, 3.0], 2) == "2.00 +- 1.00" and mean_and_deviation([0.5]) == "0.500"
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
    metrics = ("zero_shot_top1", "image_to_text_r1", "text_to_image_r1")
    stored = [
        {"loss": loss, "seed": seed, **dict.fromkeys(metrics, 0.1 * seed + shift)}
        for loss, shift in (("clip", 0.0), ("inf_cl", 0.02))
        for seed in range(3)
    ]
    monkeypatch.setattr("benchmarks.paper.accuracy.rows", lambda name: stored)
    assert "| infcl - CLIP | +0.020 +- 0.000 |" in table_3_pairs()
    assert "| spread of CLIP over seeds | 0.100 |" in table_3_pairs()


def test_largest_batches_of_different_settings_are_rows_of_their_own(monkeypatch):
    common = {
        "model": "ViT-B-16",
        "gpus": 1,
        "pixels": "gpu",
        "loss": "inf_cl",
        "precision": "bf16",
        "checkpointing": 1,
    }
    common |= {"memory_gb": 80.0, "global_batch": 2048, "fits": 1, "peak_gib": 60.0}
    changes = ({}, {"memory_gb": 139.0}, {"precision": "amp_bf16"}, {"checkpointing": 0})
    stored = [common | change | {"global_batch": 1024 * i} for i, change in enumerate(changes, 2)]
    monkeypatch.setattr(memory, "rows", lambda name: stored if name == "largest_batch.csv" else [])
    shown = [line for line in memory.table_2().splitlines() if "measured" in line]
    assert len(set(shown)) == 4 and any("at 139 GB | infcl |" in line and "| 3k |" in line for line in shown)
    assert any("infcl, amp_bf16 |" in line for line in shown) and any(
        "infcl, no checkpointing |" in line for line in shown
    )


def test_steps_of_replaced_code_are_not_shown():
    assert not [row for row in steps() if row["zero"] == "3" and row.get("commit") == "188be76"]
    table = measured_steps()
    assert "+58%" not in table and "parameters persistent |" in table
