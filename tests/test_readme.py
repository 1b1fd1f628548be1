"""The README's tree is the tree on disk, and what it names exists."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tree_block() -> str:
    """The names of the tree, without what is said of them."""
    text = (ROOT / "README.md").read_text()
    block = text.split("## What is where", 1)[1].split("\n## ", 1)[0]
    return "\n".join(re.split(r" {2,}", line.strip())[0] for line in block.splitlines())


def tracked(*patterns: str) -> list[Path]:
    """Files of the working tree that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [Path(line) for line in listing.splitlines() if (ROOT / line).is_file()]


def test_every_module_of_the_package_is_in_the_tree():
    named = set(re.findall(r"[\w.]+\.py\b", tree_block()))
    modules = {
        path.name
        for path in tracked("infcl/*.py", "megatron_patches/*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert modules - named == set()


def test_every_file_in_the_tree_exists():
    on_disk = {path.name for path in tracked()}
    named = set(re.findall(r"[\w.]+\.(?:py|json|txt|toml)\b", tree_block()))
    assert named - on_disk == set()


def test_every_top_level_folder_is_in_the_tree():
    folders = {path.parts[0] for path in tracked() if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    assert all(f"{folder}/" in tree_block() for folder in folders)


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target
