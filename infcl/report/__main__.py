"""python -m infcl.report RUN: write the page of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from infcl.config import OneLineParser
from infcl.report.page import write_report
from infcl.report.records import read_run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m infcl.report", description="One HTML page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="folder to write [RUN/report]")
    args = parser.parse_args(arguments)
    try:
        print(write_report(read_run(args.run), args.out or args.run / "report"))
    except (OSError, ValueError) as error:
        print(f"infcl.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
