"""The site builds without a warning or network and lists every flag; the check of the prose finds its words."""

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
    assert 'src="http' not in page and 'rel="stylesheet" href="http' not in page  # nothing from elsewhere


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "A fix.\n\nThe step goes on.\n", True),
        ("module.py", 'raise ValueError(f"{1} lies beside it")\n', True),
        ("script.sh", "# amid the run\n", True),
        ("page.md", "The `mend` flag.\n\n    mend\n\n```\nmend\n```\n", False),
        ("module.py", "mend = amid.lies  # fine\n", False),
    ],
)
def test_the_language_check_finds_words_in_prose_and_leaves_code_alone(name, text, found):
    assert bool(findings(text, name)) == found
