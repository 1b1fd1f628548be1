import pytest

from tests.lib.checkout import ROOT
from tests.lib.data_faults import CASES, ENDS, GOOD, run_case

PAGE = (ROOT / "docs" / "reference" / "data-faults.md").read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0][2:]: line.strip(" |").split(" | ")[1:] for line in PAGE.splitlines() if line[:2] == "| "}


@pytest.mark.parametrize("reader", ["indexed", "streaming"])
@pytest.mark.parametrize("what, case, more", CASES, ids=[what for what, _, _ in CASES])
def test_a_fault_costs_its_own_sample_and_is_counted(what, case, more, reader, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("infcl.data.samples._BAD_IN_A_ROW", 100)  # data that cannot be read at all ends soon
    outcome = run_case(case, reader, tmp_path, tokenizer)
    shown = ROWS[what][reader == "streaming"]
    assert not outcome.executed and bool(outcome.error) == shown.startswith("ends: ")
    counted = {name for name, n in outcome.report.items() if name.split("/")[0] in ("skipped", "index") and n}
    if reader == "streaming":
        assert outcome.error or outcome.used >= (20 if counted or "replaced" in what else GOOD)
    elif more is ENDS:
        assert outcome.error
    else:
        assert not outcome.error and outcome.used == GOOD + more
        assert counted or more in (0, 2, 3)  # what costs samples is never silent
        assert all(f"`{name}` {outcome.report[name]}" in shown for name in counted if name.startswith("index/")), shown


def test_the_page_of_faults_has_all_of_them():
    assert list(ROWS)[1:] == [what for what, _, _ in CASES]
