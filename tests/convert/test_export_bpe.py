"""A transformers export of a model with CLIP's own vocabulary has CLIP's own tokenizer."""

import importlib.util

import pytest
import torch

from infcl.convert.export import export_model
from infcl.data.tokenizer.open_clip import OpenClipTokenizer
from infcl.models import CLIP
from infcl.models.config import parse_model_config
from tests.lib.open_clip_stub import import_open_clip, import_transformers
from tests.lib.small_clip import LANGUAGES

CAPTIONS = [
    "A photo of a Dog, brown!",
    "it's 1995:  they'll\tsay \u201cwow\u201d \u2026 isn\u2019t it?",
    "cafe\u0301 na\u00efve \u00dcber stra\u00dfe",
    "\u732b\u306e\u5199\u771f \u0441\u043e\u0431\u0430\u043a\u0430 \U0001f436",
    *LANGUAGES,
    "",
    "one two three four " * 30,
]


@pytest.fixture
def cfg():
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 1}
    return parse_model_config({"embed_dim": 24, "vision_cfg": vision, "text_cfg": text})


def test_the_exported_tokenizer_gives_the_ids_of_training(cfg, tmp_path):
    import_open_clip()
    transformers = import_transformers()
    export_model(CLIP(cfg).state_dict(), cfg, None, tmp_path / "hf", format="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    expected = OpenClipTokenizer("open_clip:ViT-B-32", 77)(CAPTIONS)
    rows = theirs(CAPTIONS, **options).input_ids
    after_the_end = (expected == 49407).cumsum(1) > 0
    assert torch.equal(rows, expected.masked_fill(after_the_end, 49407))
    assert 'from_pretrained("FOLDER")\nprocessor' in (tmp_path / "hf" / "README.md").read_text()


def test_without_open_clip_the_export_ends_before_it_writes_a_folder_without_a_tokenizer(cfg, tmp_path, monkeypatch):
    """transformers answered each caption with [0, 2, 2, ...] from such a folder, and said nothing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: name != "open_clip" and find(name, *more) or None
    )
    with pytest.raises(ValueError, match="--format hf .* pip install open_clip_torch"):
        export_model(CLIP(cfg).state_dict(), cfg, None, tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()
