"""The site builds without a warning or network, the reference is the code's; the check of the prose finds its words."""

import os
import subprocess
import sys

import pytest

import infcl
from dev.check_language import findings
from dev.reference import PUBLIC, pages
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


@pytest.mark.long
def test_the_site_loads_nothing_from_elsewhere(site):
    page = (site / "reference" / "flags.html").read_text()
    assert "--batch-size" in page and 'src="http' not in page and 'rel="stylesheet" href="http' not in page


@pytest.mark.parametrize(("path", "text"), pages().items(), ids=lambda value: getattr(value, "stem", ""))
def test_the_reference_pages_are_those_of_the_code(path, text):
    assert path.read_text() == text, f"{path.name} differs from the code: python dev/reference.py"


def test_the_reference_has_every_public_name():
    names = {name for entries in PUBLIC.values() for _, name in entries}
    assert names == {*infcl.__all__, "RingMultipleNegativesRankingLoss"}


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
