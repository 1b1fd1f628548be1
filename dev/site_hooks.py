"""Hooks of the site's build (mkdocs.yml): tables of flags and modules; links out of docs/ become text."""

import ast
import dataclasses
import os
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from infcl.config.settings import TrainConfig, option_of  # noqa: E402

GROUPS = {"optimisation": "Optimization"}


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fill the flag tables, and name files of the repository that the site does not hold instead of linking them."""
    folder = Path("docs", page.file.src_uri).parent
    markdown = markdown.replace("<!-- flags -->", flag_tables()).replace("<!-- modules -->", module_table())
    return re.sub(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s#]+)[^)]*\)", lambda link: _inside(link, folder), markdown)


@cache
def flag_tables() -> str:
    """Return a Markdown table for each group of flags: flag, default, what it does."""
    groups: dict[str, list[str]] = {}
    for entry in dataclasses.fields(TrainConfig):
        rows = groups.setdefault(entry.metadata["group"], [])
        rows.append(
            f"| `{option_of(entry.name)}` | {_default(entry)} | {_cell(entry.metadata['help'])}{_choices(entry)} |"
        )
    head = "| flag | default | meaning |\n|---|---|---|\n"
    return "\n\n".join(
        f"### {GROUPS.get(name, name.capitalize())}\n\n{head}" + "\n".join(rows) for name, rows in groups.items()
    )


@cache
def module_table() -> str:
    """Return a Markdown table of the modules of infcl and megatron_patches with the first line of their docstrings."""
    lines = ["| module | what it is |", "|---|---|"]
    for path in sorted([*ROOT.glob("infcl/**/*.py"), *ROOT.glob("megatron_patches/*.py")]):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{path.relative_to(ROOT)}` | {_cell(text.partition(chr(10))[0])} |")
    return "\n".join(lines)


def _default(entry) -> str:
    value = entry.default if entry.default is not dataclasses.MISSING else None
    if value is False:
        return "off"
    return "" if value is None else f"`{'tab' if value == chr(9) else value}`"


def _choices(entry) -> str:
    choices = entry.metadata["argparse"].get("choices")
    return f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


def _inside(link: re.Match, folder: Path) -> str:
    target = os.path.normpath(folder / link[2])
    return link[0] if target.startswith("docs/") and not (ROOT / target).is_dir() else f"`{target}`"
