import pytest

from tests.lib.checkout import ROOT
from tests.lib.data_faults import CASES, ENDS, GOOD, run_case

PAGE = (ROOT / "docs" / "reference" / "data-faults.md").read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0][2:]: line for line in PAGE.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("what, case, more", CASES, ids=[what for what, _, _ in CASES])
def test_a_fault_costs_its_own_sample_and_is_counted(what, case, more, tmp_path, tokenizer):
    outcome, executed = run_case(case, "indexed", tmp_path, tokenizer)
    assert not executed and outcome.seconds < 30
    if more is ENDS:
        assert outcome.error
        return
    assert not outcome.error and outcome.used == GOOD + more
    counted = {name for name, n in outcome.report.items() if name.split("/")[0] in ("skipped", "index") and n}
    assert counted or more in (0, 2, 3)  # what costs samples is never silent
    indexed = ROWS[what].split(" | ")[1]
    assert all(f"`{name}` {outcome.report[name]}" in indexed for name in counted if name.startswith("index/")), indexed


@pytest.mark.parametrize("what, case, more", CASES, ids=[what for what, _, _ in CASES])
def test_the_streaming_reader_survives_the_same(what, case, more, tmp_path, tokenizer):
    outcome, executed = run_case(case, "streaming", tmp_path, tokenizer)
    assert not executed and outcome.seconds < 30
    assert bool(outcome.error) == ROWS[what].split(" | ")[2].startswith("ends: ")
    if not outcome.error:
        assert outcome.used >= 20
        assert outcome.used >= GOOD or any(name.startswith("skipped/") for name in outcome.report) or "replaced" in what


def test_the_page_of_faults_has_all_of_them():
    assert list(ROWS)[1:] == [what for what, _, _ in CASES]
