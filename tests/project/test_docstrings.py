"""Every public function documents its arguments; that every module has a docstring is a rule of ruff's."""

import inspect
import re

import pytest

import infcl


@pytest.mark.parametrize("name", infcl.__all__)
def test_public_functions_document_their_arguments(name):
    thing = getattr(infcl, name)
    text = inspect.getdoc(thing)
    assert text
    if re.search("(options are those of|arguments as in) `inf_cl_loss`", text):
        text += inspect.getdoc(infcl.inf_cl_loss)
    parameters = set(inspect.signature(thing).parameters) if inspect.isfunction(thing) else set()
    assert {parameter for parameter in parameters if parameter not in text} == set()
