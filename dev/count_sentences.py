"""Count long and numeric sentences in the prose of Markdown files: `python dev/count_sentences.py README.md docs/*.md`.

Prints per file the number of sentences, the share with over 35 words and the share with four or more numbers.
Code blocks, tables, headings, comments and the targets of links are not prose.
"""

import re
import sys
from pathlib import Path


def main(paths: list[str]) -> None:
    print(f"{'file':32} {'sentences':>9} {'>35 words':>10} {'>=4 numbers':>12}")
    for path in paths:
        found = sentences(Path(path).read_text(encoding="utf-8"))
        long = sum(len(sentence.split()) > 35 for sentence in found)
        numeric = sum(len(re.findall(r"(?<![\w.])\d[\d,.]*", sentence)) >= 4 for sentence in found)
        total = max(len(found), 1)
        print(f"{path:32} {len(found):9} {long / total:10.1%} {numeric / total:12.1%}")


def sentences(text: str) -> list[str]:
    """Split the prose of a Markdown text into sentences; a list item or paragraph ends one."""
    text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", text)
    lines = [line for line in text.splitlines() if not re.match(r" {4}\S|#|\s*\||\s*!\[", line)]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    found = [
        part.strip() for block in blocks for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(block.split()))
    ]
    return [sentence for sentence in found if len(sentence.split()) > 2]


if __name__ == "__main__":
    main(sys.argv[1:])
