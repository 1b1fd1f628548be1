"""docs/results/defects.csv: each defect that was found has a test."""

import re

from benchmarks.rows import rows
from tests.lib.checkout import ROOT


def test_each_number_has_rows_and_each_row_a_test_that_exists():
    defects = rows("defects.csv")
    assert sorted({int(row["item"]) for row in defects}) == list(range(1, 24))
    missing = []
    for row in defects:
        file, name = row["test"].split("::")
        if not re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE):
            missing.append(row["test"])
    assert missing == []
