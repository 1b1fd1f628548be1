"""Check the words of the project's prose: `python dev/check_language.py [FILE ...]`; exit code 1 on a finding.

The prose is Markdown without code, the comments of shell scripts, and the comments and strings of Python files.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = {  # pattern: what to write
    r"mend(s|ed|ing)?": "fix, workaround",
    r"anew": "again, from scratch",
    r"amid": "during",
    r"heed(s|ed)?": "use",
    r"reckon(s|ed|ing)?": "compute, estimate",
    r"otherwise than": "unlike",
    r"but for": "except",
    r"in the mean": "on average",
    r"masters": "FP32 master weights",
    r"passed over": "skipped",
    r"(has|have|had|did) not come": "did not join",
    r"levers?": "tuning options",
    r"law of averages": "gradient scaling convention",
    r"the truth": "the exact value, the reference",
    r"beside": "next to, compared with, in addition to",
    r"(16|sixteen)[ -]bits?(?! (grey|images?))": "half precision (BF16/FP16)",
    r"(go|goes|went) on": "continue",
    r"mistakes?": "usage error, error",
    r"lies": "is stored, is in",
    r"is (told|said)|are (told|said)": "is reported, is logged",
    r"graphs that stay|resident micro-batch(es)?": "cached activations",
}
ANY = re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(WORDS)})(?![\w-])")
NOT_PROSE = (
    "CHANGELOG.md",
    "dev/check_language.py",
    "docs/results",
    "tests/golden",
    "tests/project/test_site.py",
)


def main(paths: list[str]) -> int:
    found = [finding for path in paths or tracked() for finding in findings((ROOT / path).read_text("utf-8"), path)]
    print(*found, f"language: {len(found)} findings", sep="\n")
    return int(bool(found))


def tracked() -> list[str]:
    """Return the project's files with prose."""
    command = ["git", "ls-files", "*.py", "*.md", "*.sh", "*.sbatch"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [path for path in paths if not _below(path, NOT_PROSE) and (ROOT / path).exists()]


def findings(text: str, path: str) -> list[str]:
    """Return one line for each word of WORDS in the prose of a file."""
    found = []
    for number, line in prose(text, Path(path).suffix):
        for pattern, better in WORDS.items() if ANY.search(line) else ():
            for match in re.finditer(rf"(?i)(?<![\w-])(?:{pattern})(?![\w-])", line):
                found.append(f"{path}:{number}: {match[0]!r}: write {better}")
    return found


def prose(text: str, suffix: str) -> list[tuple[int, str]]:
    """Return (line number, prose of the line); text in backticks is code."""
    if suffix == ".py":
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines = [
            (token.start[0] + offset, line)
            for token in tokens
            if token.type in kinds
            for offset, line in enumerate(token.string.splitlines())
        ]
    elif suffix == ".md":
        blank = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", lambda block: "\n" * block[0].count("\n"), text)
        lines = [(n, line) for n, line in enumerate(blank.splitlines(), 1) if not line.startswith("    ")]
    else:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")]
    return [(number, re.sub(r"`[^`]*`", "", line)) for number, line in lines]


def _below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
