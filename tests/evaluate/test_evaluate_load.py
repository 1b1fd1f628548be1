"""Which tokenizer an evaluation takes: sentencepiece, Hugging Face's files, or a rejection with the numbers."""

import json

import pytest
import torch

from infcl.convert.export import export_model
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.source import find_tokenizer, stored_tokenizer
from infcl.evaluate.load import load_model
from infcl.models import CLIP, load_model_config
from tests.lib.open_clip_stub import import_transformers
from tests.lib.small_clip import CONTEXT_LENGTH, TEXTS, small_config


def test_a_folder_has_a_sentencepiece_model_under_either_name_else_hugging_faces_files(tokenizer_model, tmp_path):
    import_transformers()  # or skip
    model = CLIP(small_config())
    folder = export_model(model.state_dict(), model.cfg, tokenizer_model, tmp_path / "hf", format="hf")
    expected, other = Tokenizer(tokenizer_model, CONTEXT_LENGTH)(TEXTS), folder / "tokenizer.model"
    changes = (lambda: None, lambda: (folder / "spiece.model").rename(other), other.unlink)
    for change, kind in zip(changes, ("sentencepiece", "sentencepiece", "hf")):
        change()
        for source in (find_tokenizer(folder, small_config()), stored_tokenizer(folder, small_config())):
            assert source.kind == kind and torch.equal(source.open(CONTEXT_LENGTH)(TEXTS), expected)


def test_a_tokenizer_that_never_writes_the_id_at_which_the_model_pools_is_rejected(tokenizer_model, tmp_path):
    import_transformers()  # or skip
    model = CLIP(small_config())
    folder = export_model(model.state_dict(), model.cfg, tokenizer_model, tmp_path / "hf", format="hf")
    (folder / "spiece.model").unlink()
    fields = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(fields | {"post_processor": None}))
    with pytest.raises(ValueError, match="the model pools at id 1, with which it does not end a caption"):
        load_model(folder, device=torch.device("cpu"))


def test_a_tokenizer_that_cannot_be_the_models_is_rejected(tokenizer_model, tmp_path):
    small = load_model_config("demo").with_tokenizer(vocab_size=299, context_length=20, eos_id=1, pad_id=0)
    folder = export_model(CLIP(small).state_dict(), small, None, tmp_path)
    for name, message in (
        (tokenizer_model, "has 300 ids, the model 299 embeddings"),
        (tmp_path / "none.model", "none.model: no such file or folder"),
        (tmp_path, "no tokenizer there"),
        (None, "no tokenizer is stored with the weights, and 299 ids are not CLIP's own: give --tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(folder, device=torch.device("cpu"), tokenizer=name)
