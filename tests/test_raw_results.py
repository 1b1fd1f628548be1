"""Raw results under docs/results name commits of this history, so that what was measured can be looked up."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.checkout import ROOT, git, is_checkout

RESULTS = ROOT / "docs" / "results"


def commits_of(path: Path) -> set[str]:
    """Without the "+" of local changes."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            named = {row.get("commit") or "" for row in csv.DictReader(file)}
    else:
        named = {json.loads(path.read_text()).get("commit") or ""}
    return {name.removesuffix("+") for name in named} - {""}


def test_every_commit_that_raw_results_name_is_in_the_history():
    if not is_checkout():
        pytest.skip("an archive has no commits, and without git none can be looked up")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone has not all commits")
    named = {path.name: commits_of(path) for path in [*RESULTS.glob("*.csv"), *RESULTS.glob("*.json")]}
    assert sum(map(bool, named.values())) > 5
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commits in named.values() for commit in commits)
    missing = {
        f"{commit} ({name})"
        for name, commits in named.items()
        for commit in commits
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode
    }
    assert not missing, f"no commits of this history: {sorted(missing)}; measure again, or leave the rows out"
