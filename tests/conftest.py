"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    """The embedded data set with 1,536 training pairs: shards, tokenizer, evaluation sets."""
    from infcl.data.demo import prepare_demo

    return prepare_demo(tmp_path_factory.mktemp("data") / "demo", num_train=1536)
