"""Docstrings as HTML: python docs/render.py FOLDER (make docs).

They are plain text, laid out for reading in the source, with formulas full of stars: kept as they are, not Markdown.
"""

import html
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc


def modules(name: str) -> Iterator[str]:
    """What pdoc has to be told: below a package with __all__ it looks at nothing else by itself."""
    yield name
    module = importlib.import_module(name)
    if hasattr(module, "__path__") and hasattr(module, "__all__"):
        for child in pkgutil.iter_modules(module.__path__, f"{name}."):
            if not child.name.endswith("__main__"):
                yield from modules(child.name)


def as_written(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text, quote=False)}</pre>'


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    warnings.simplefilter("error")
    warnings.filterwarnings("default", category=DeprecationWarning)  # those of other packages
    pdoc.render.env.filters["to_markdown"] = as_written
    pdoc.pdoc(*modules("infcl"), "megatron_patches", output_directory=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
