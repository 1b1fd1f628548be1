"""Hook of the site's build (mkdocs.yml): a link to a file that the site does not hold becomes text."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Name files of the repository outside docs/ instead of linking them."""
    folder = Path("docs", page.file.src_uri).parent
    return re.sub(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s#]+)[^)]*\)", lambda link: _inside(link, folder), markdown)


def _inside(link: re.Match, folder: Path) -> str:
    target = os.path.normpath(folder / link[2])
    return link[0] if target.startswith("docs/") and not (ROOT / target).is_dir() else f"`{target}`"
