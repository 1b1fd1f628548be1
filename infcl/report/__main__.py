"""python -m infcl.report RUN [RUN_B ...]: write the page of a run, or of several runs side by side."""

import sys
from collections.abc import Sequence
from pathlib import Path

from infcl.config import OneLineParser
from infcl.report.page import write_report
from infcl.report.records import read_run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m infcl.report", description="One HTML page about a run, or about several side by side."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; more than one are compared")
    parser.add_argument("--out", type=Path, help="folder to write [RUN/report of the first run]")
    args = parser.parse_args(arguments)
    try:
        runs = [read_run(root) for root in args.runs]
        print(write_report(runs, args.out or args.runs[0] / "report"))
    except (OSError, ValueError) as error:
        print(f"infcl.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
