"""The README links the documents and lists every extra; the citation is current."""

import importlib.util
import re
import sys

import pytest

import infcl
from tests.lib.checkout import ROOT, tracked


def test_every_document_outside_the_site_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+)\)", text))
    documents = {path.as_posix() for path in tracked("*.md") if len(path.parts) < 3 and path.parts[0] != "docs"}
    assert documents - linked - {"README.md"} == set()


def test_every_extra_of_the_package_is_in_the_readme():
    pyproject = (ROOT / "pyproject.toml").read_text()
    table = pyproject.split("[project.optional-dependencies]\n", 1)[1].split("\n[tool", 1)[0]
    extras = set(re.findall(r"(?m)^(\w+) = \[", table))
    assert extras and extras == set(re.findall(r"`\.\[(\w+)\]`", (ROOT / "README.md").read_text()))


def test_the_citation_names_this_version_and_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == infcl.__version__
    assert f"## [{citation['version']}] - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["cff-version"] == "1.2.0" and citation["references"][0]["url"].endswith("2410.17243")


def test_requirements_txt_installs_what_tests_import():
    text = "".join((ROOT / path).read_text() for path in tracked("tests/*.py"))
    packages = set(re.findall(r'importorskip\("(\w+)', text))
    optional = {"accelerate", "bitsandbytes", "datasets"}
    optional |= {"transformers"} if sys.version_info < (3, 11) else set()
    assert optional < packages
    assert {name for name in packages - optional if importlib.util.find_spec(name) is None} == set()
