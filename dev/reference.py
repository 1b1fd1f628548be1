"""Write docs/reference/flags.md and api.md from the code: `python dev/reference.py`.

In:  the dataclass of flags, and the docstrings and signatures of the public functions, which are read but not imported.
Out: the table of all flags, below its heading, and the complete page of the API.
"""

import ast
import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from infcl.config.settings import TrainConfig, option_of, shown_default  # noqa: E402

FLAGS, API = ROOT / "docs/reference/flags.md", ROOT / "docs/reference/api.md"
NOTE = "<!-- Written by dev/reference.py; `python dev/reference.py` writes it again. -->\n"
GROUPS = {"optimisation": "Optimization"}
PUBLIC = {  # heading: (module, name)
    "Losses": (
        ("infcl/loss/inf_cl.py", "inf_cl_loss"),
        ("infcl/loss/contrastive.py", "InfCLLoss"),
        ("infcl/loss/siglip.py", "siglip_loss"),
        ("infcl/loss/contrastive.py", "SigLipLoss"),
        ("infcl/loss/info_nce.py", "info_nce_loss"),
        ("infcl/loss/nt_xent.py", "nt_xent_loss"),
        ("infcl/loss/distillation.py", "distillation_loss"),
        ("infcl/loss/matryoshka.py", "matryoshka"),
    ),
    "Options of all losses": (("infcl/loss/inputs.py", "RingOptions"),),
    "Any encoders": (
        ("infcl/step/contrastive.py", "contrastive_step"),
        ("infcl/step/contrastive.py", "Encoders"),
        ("infcl/step/contrastive.py", "split_batch"),
        ("infcl/integrations/sentence_transformers.py", "RingMultipleNegativesRankingLoss"),
    ),
}
LISTS = ("Args", "Attributes", "Raises")  # sections of a docstring whose lines are "name: text"


def pages() -> dict[Path, str]:
    """Return the text of both pages."""
    head = FLAGS.read_text(encoding="utf-8").partition(NOTE)[0]
    return {FLAGS: head + NOTE + "\n" + flag_tables(), API: api_page()}


def flag_tables() -> str:
    """Return a Markdown table for each group of flags: flag, default, what it does."""
    groups: dict[str, list[str]] = {}
    for entry in dataclasses.fields(TrainConfig):
        choices = entry.metadata["argparse"].get("choices") or ()
        meaning = _cell(entry.metadata["help"]) + (f" ({', '.join(f'`{one}`' for one in choices)})" if choices else "")
        rows = groups.setdefault(entry.metadata["group"], [])
        rows.append(f"| `{option_of(entry.name)}` | {_default(entry)} | {meaning} |")
    head = "| flag | default | meaning |\n|---|---|---|\n"
    return "\n".join(
        f"### {GROUPS.get(name, name.capitalize())}\n\n{head}" + "\n".join(rows) + "\n" for name, rows in groups.items()
    )


def api_page() -> str:
    """Return the page of the public functions and classes: signature, text, arguments, result, errors."""
    lines = ["# Python API", "", NOTE, "The public names of `infcl`. Everything else may change without notice.", ""]
    for heading, names in PUBLIC.items():
        lines += [f"## {heading}", ""]
        for path, name in names:
            module = "infcl" if "integrations" not in path else path.removesuffix(".py").replace("/", ".")
            node = _find(path, name)
            lines += [f"### `{name}`", "", f"```python\nfrom {module} import {name}\n\n{signature(node)}\n```", ""]
            lines += [markdown_of(ast.get_docstring(node) or ""), ""]
    return "\n".join(lines).rstrip() + "\n"


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the call of a function or class as its source has it: on one line, or one line per argument."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    call, returns = inits[0] if isinstance(node, ast.ClassDef) and inits else node, ""
    if isinstance(call, ast.FunctionDef):
        given = call.args
        plain, defaults = given.args, [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
        parts = [_argument(one, default) for one, default in zip(plain, defaults) if one.arg != "self"]
        parts += [f"*{ast.unparse(given.vararg)}"] if given.vararg else ["*"] if given.kwonlyargs else []
        parts += [_argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults)]
        parts += [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
        returns = f" -> {ast.unparse(call.returns)}" if call.returns else ""
    else:  # a dataclass
        parts = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    parts = [part.replace("'", '"') for part in parts]
    flat = f"{node.name}({', '.join(parts)}){returns}"
    return flat if len(flat) <= 100 else "\n".join([f"{node.name}(", *(f"    {one}," for one in parts), f"){returns}"])


def markdown_of(docstring: str) -> str:
    """Return a docstring in Google style as Markdown. Each entry of a section is one paragraph or one item."""
    text, *sections = re.split(r"(?m)^(\w+):\n(?=    )", docstring)
    found = [_escaped(text.strip())]
    for title, body in zip(sections[::2], sections[1::2]):
        body, _, after = body.partition("\n\n")
        entries = re.split(r"\n    (?=\S)", "\n" + body.rstrip())[1:]
        if title in LISTS:
            items = [re.match(r"(?s)([^:]+): (.*)", _joined(entry)) for entry in entries]
            found.append(
                f"**{title}**\n\n" + "\n".join(f"- `{item[1]}`: {_escaped(item[2])}" for item in items if item)
            )
        else:
            found.append(f"**{title}**\n\n{_escaped(_joined(body))}")
        found += [_escaped(after.strip())] if after.strip() else []
    return "\n\n".join(found)


def _find(path: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    raise ValueError(f"{path} has no {name}")


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + (equals + ast.unparse(default) if default is not None else "")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Return text in which an asterisk outside code stays one."""
    return re.sub(r"`[^`]*`|\*", lambda part: part[0] if part[0] != "*" else r"\*", text)


def _default(entry: dataclasses.Field) -> str:
    value = entry.default if entry.default is not dataclasses.MISSING else None
    if value is False:
        return "off"
    return "" if value is None else f"`{shown_default(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
