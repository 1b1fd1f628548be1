"""The README's tree is the tree on disk, and what it names exists."""

import importlib.util
import re
import sys

import pytest

from tests.lib.checkout import ROOT, tracked


def tree() -> set[str]:
    """The paths that the tree names; folders end with a slash."""
    text = (ROOT / "README.md").read_text()
    block = text.split("## What is where", 1)[1].split("\n## ", 1)[0]
    paths, above = set(), []
    for line in block.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 2  # the block itself is indented by four
        names = re.match(r"[\w./]+(, [\w./]+)*", line.strip())[0].split(", ")
        above = above[:depth] + [names[-1] if names[-1].endswith("/") else ""]
        paths |= {"".join(above[:depth]) + name for name in names}
    return paths


def test_every_module_of_the_package_is_in_the_tree():
    modules = {
        path.as_posix()
        for path in tracked("infcl/*.py", "megatron_patches/*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert modules - tree() == set()


def test_every_path_in_the_tree_exists():
    files = {path.as_posix() for path in tracked()}
    folders = {f"{parent.as_posix()}/" for path in tracked() for parent in path.parents}
    assert tree() - files - folders == set()


def test_every_top_level_folder_is_in_the_tree():
    folders = {path.parts[0] for path in tracked() if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    assert {f"{folder}/" for folder in folders} - tree() == set()


def test_every_link_of_the_documents_leads_somewhere():
    for document in (ROOT / name for name in tracked("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), f"{document}: {target}"


def test_every_document_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+)\)", text))
    assert {path.as_posix() for path in tracked("*.md") if len(path.parts) < 3} - linked - {"README.md"} == set()


def test_every_extra_of_the_package_is_in_the_readme():
    pyproject = (ROOT / "pyproject.toml").read_text()
    table = pyproject.split("[project.optional-dependencies]\n", 1)[1].split("\n[tool", 1)[0]
    extras = set(re.findall(r"(?m)^(\w+) = \[", table))
    assert extras and extras == set(re.findall(r"`\.\[(\w+)\]`", (ROOT / "README.md").read_text()))


def test_the_citation_names_this_version_and_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == re.search(r'version = "(.+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"## {citation['version']}, {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["cff-version"] == "1.2.0" and citation["references"][0]["url"].endswith("2410.17243")


def test_no_test_is_skipped_for_want_of_what_requirements_txt_installs():
    text = "".join((ROOT / path).read_text() for path in tracked("tests/*.py"))
    packages = set(re.findall(r'importorskip\("(\w+)', text))
    optional = {"bitsandbytes", "pyarrow"} | ({"transformers", "tokenizers"} if sys.version_info < (3, 11) else set())
    assert optional < packages
    assert {name for name in packages - optional if importlib.util.find_spec(name) is None} == set()
