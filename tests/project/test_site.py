"""The site builds without a warning or network and lists every flag; prose keeps the project's words."""

import dataclasses
import os
import subprocess
import sys

import pytest

from dev.check_language import findings
from infcl.config.settings import TrainConfig, option_of
from tests.lib.checkout import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


def test_the_flags_page_lists_every_flag(site):
    page = (site / "reference" / "flags.html").read_text()
    flags = [option_of(entry.name) for entry in dataclasses.fields(TrainConfig)]
    assert [flag for flag in flags if flag not in page] == []


def test_pages_load_nothing_from_elsewhere(site):
    for page in ("index.html", "reference/flags.html"):
        text = (site / page).read_text()
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "A fix.\n\nThe step goes on.\n"),
        ("module.py", '"""Docstring."""\nx = 1  # a mend of DeepSpeed\n'),
        ("module.py", 'raise ValueError(f"{1} lies beside it")\n'),
        ("script.sh", "# amid the run\n"),
    ],
)
def test_the_language_check_finds_a_planted_word(name, text):
    assert findings(text, name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "The `mend` flag.\n\n    mend\n\n```\nmend\n```\n"),
        ("module.py", "mend = amid.lies  # fine\n"),
        ("script.sh", "mend --anew\n"),
    ],
)
def test_the_language_check_leaves_code_alone(name, text):
    assert not findings(text, name)


def test_clean_files_keep_the_words():
    result = subprocess.run([sys.executable, "dev/check_language.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
