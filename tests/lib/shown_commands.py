"""Commands and Python blocks in the documentation.

Commands are indented lines, fenced lines and `inline` code that begin with one of PROGRAMS, in README.md,
CONTRIBUTING.md, docs/ and ds_configs/README.md, and the command lines at the top of launch/*.
"""

import re
from pathlib import Path

from tests.lib.checkout import ROOT

PROGRAMS = (
    "make python .venv/bin/python pytest deepspeed torchrun bash sbatch kubectl pip git mpirun srun source".split()
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))}) \S.*", re.DOTALL)


def documents() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(path for path in ROOT.glob("docs/**/*.md") if "results" not in path.parts),
        ROOT / "ds_configs/README.md",
    ]


def shown_commands() -> dict[str, list[str]]:
    """Return {command: files that show it}, with continuation lines joined and text after two spaces or # removed."""
    shown: dict[str, list[str]] = {}
    for path in [*documents(), *sorted(ROOT.glob("launch/*"))]:
        text = path.read_text(encoding="utf-8")
        found = _of_markdown(text) if path.suffix == ".md" else _of_script(text)
        for command in found:
            files = shown.setdefault(command, [])
            name = path.relative_to(ROOT).as_posix()
            if name not in files:
                files.append(name)
    return shown


def python_blocks() -> dict[str, str]:
    """Return {'docs/start/tutorial.md 0': source of a fenced Python block}."""
    blocks = {}
    for path in documents():
        for number, source in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)):
            blocks[f"{path.relative_to(ROOT).as_posix()} {number}"] = source
    return blocks


def _of_markdown(text: str) -> list[str]:
    text = _joined(re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL))
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL))
    prose = re.sub(r"(?m)^ {4}.*$|^```.*?^```", "", text)
    lines = [*re.findall(r"(?m)^ {4}(\S.*)", text), *fenced.splitlines(), *re.findall(r"`([^`]+)`", prose)]
    return [command for line in lines if (command := _command(line))]


def _of_script(text: str) -> list[str]:
    found = re.findall(r"(?m)^#   command   (.*(?:\n# {10,}\S.*)*)", _joined(text))
    return [command for block in found for line in re.split(r"\n# +", block) if (command := _command(line))]


def _joined(text: str) -> str:
    return re.sub(r" *\\\n#?\s*", " ", text)


def _command(line: str) -> str | None:
    line = re.split(r" {2,}|\s+# ", line.replace("\n", " ").strip())[0]
    return line if _COMMAND.fullmatch(line) else None
