"""Every module and every public function documents itself."""

import ast
import inspect
import re

import pytest

import infcl
from tests.lib.checkout import ROOT

MODULES = [
    path.relative_to(ROOT).as_posix()
    for package in ("infcl", "megatron_patches", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def test_every_module_has_a_docstring():
    missing = [file for file in MODULES if not ast.get_docstring(ast.parse((ROOT / file).read_text()))]
    assert missing == []


@pytest.mark.parametrize("name", infcl.__all__)
def test_public_functions_document_their_arguments(name):
    thing = getattr(infcl, name)
    text = inspect.getdoc(thing)
    assert text
    if re.search("(options are those of|arguments as in) `inf_cl_loss`", text):
        text += inspect.getdoc(infcl.inf_cl_loss)
    parameters = set(inspect.signature(thing).parameters) if inspect.isfunction(thing) else set()
    assert {parameter for parameter in parameters if parameter not in text} == set()
