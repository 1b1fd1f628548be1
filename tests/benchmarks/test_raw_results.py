"""Raw results under docs/results name commits of this history, device and versions, so that they can be looked up."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.rows import read
from tests.lib.checkout import ROOT, git, is_checkout

RESULTS = ROOT / "docs" / "results"
# How many rows may say less, and why; no others may.
BARE = {
    "accuracy_batches_curves.csv": 2280,  # the losses of the runs in accuracy_batches.csv
    "accuracy_losses_curves.csv": 2100,  # in accuracy_losses.csv
    "accuracy_losses_ranks_curves.csv": 1750,  # in accuracy_losses_ranks.csv
    "plan_steps.csv": 1,  # older than the columns, as the next
    "rings.csv": 4,
    "h100_measured.json": 1,  # a profile for the planner, as the next
    "h200_measured.json": 1,
    "paper_memory.csv": 53,  # of the paper
    "scaling_eth100.csv": 20,  # planned, as the next
    "scaling_nic400.csv": 20,
}
# How many rows are of a commit with local changes ("+"), which cannot be looked up; no more may come.
CHANGED = {
    "retrieval.csv": 5,
    "step_waits.csv": 9,
    "tensor_parallel.csv": 6,
    "tensor_parallel_blocks.csv": 14,
    "tensor_parallel_losses.csv": 20,
}


def raw_results() -> list[Path]:
    return [*RESULTS.glob("*.csv"), *RESULTS.glob("*.json")]


def rows_of(path: Path) -> list[dict]:
    if path.suffix == ".json":
        return [json.loads(path.read_text())]
    return read(path)


def says_where(row: dict) -> bool:
    """Commit, device and torch; triton's version where the file has a column of it."""
    return all((row.get("commit"), row.get("device") or row.get("cpu"), row.get("torch"), row.get("triton", "none")))


def commits_of(path: Path) -> set[str]:
    """Without the "+" of local changes."""
    return {(row.get("commit") or "").removesuffix("+") for row in rows_of(path)} - {""}


def test_every_raw_result_is_shown_or_described():
    said = "".join(path.read_text() for path in [*ROOT.glob("docs/*.md"), RESULTS / "README.md"])
    said += "".join(path.read_text() for path in ROOT.glob("benchmarks/paper/*.py"))
    assert not [path.name for path in RESULTS.iterdir() if path.name != "README.md" and path.name not in said]


def test_every_row_names_its_commit_device_and_versions():
    bare = {path.name: sum(not says_where(row) for row in rows_of(path)) for path in raw_results()}
    assert {name: count for name, count in bare.items() if count} == BARE


@pytest.mark.parametrize("missing", ["commit", "device", "torch", "triton"])
def test_a_row_without_one_of_them_is_seen(missing):
    row = {"commit": "0c83720", "device": "cpu", "torch": "2.13.0", "triton": "3.7.1"}
    assert says_where(row) and not says_where(row | {missing: ""})


def test_rows_of_commits_with_local_changes_become_no_more():
    changed = {
        path.name: sum((row.get("commit") or "").endswith("+") for row in rows_of(path)) for path in raw_results()
    }
    assert {name: count for name, count in changed.items() if count} == CHANGED


def test_every_commit_that_raw_results_name_is_in_the_history():
    if not is_checkout():
        pytest.skip("an archive has no commits, and without git none can be looked up")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone has not all commits")
    named = {path.name: commits_of(path) for path in raw_results()}
    assert sum(map(bool, named.values())) > 5
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commits in named.values() for commit in commits)
    missing = {
        f"{commit} ({name})"
        for name, commits in named.items()
        for commit in commits
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode
    }
    assert not missing, f"no commits of this history: {sorted(missing)}; measure again, or leave the rows out"
