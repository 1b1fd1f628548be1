"""Which tokenizer an evaluation takes: sentencepiece, Hugging Face's files, or a rejection with the numbers."""

import shutil

import pytest
import torch

from infcl.convert.export import export_model
from infcl.data.tokenizer import Tokenizer
from infcl.evaluate.load import load_tokenizer
from infcl.models import CLIP, load_model_config
from tests.lib.open_clip_stub import import_transformers
from tests.lib.small_clip import CONTEXT_LENGTH, TEXTS, small_config


def test_a_folder_of_hugging_faces_tokenizer_files_gives_the_models_own_ids(tokenizer_model, tmp_path):
    import_transformers()  # or skip
    model = CLIP(small_config())
    export_model(model.state_dict(), model.cfg, tokenizer_model, tmp_path / "hf", format="hf")
    (tmp_path / "files").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "hf" / name, tmp_path / "files")
    ids = load_tokenizer(tmp_path / "files", model.cfg)(TEXTS)
    assert ids.shape == (len(TEXTS), CONTEXT_LENGTH)
    assert torch.equal(ids, Tokenizer(tokenizer_model, CONTEXT_LENGTH)(TEXTS))


def test_a_sentencepiece_model_is_found_in_its_folder_under_either_name(tokenizer_model, tmp_path):
    expected = Tokenizer(tokenizer_model, CONTEXT_LENGTH)(TEXTS)
    for name in ("tokenizer.model", "spiece.model"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        shutil.copy(tokenizer_model, folder / name)
        assert torch.equal(load_tokenizer(folder, small_config())(TEXTS), expected)


def test_a_tokenizer_that_cannot_be_the_models_is_rejected(tokenizer_model, tmp_path):
    small = load_model_config("demo").with_tokenizer(vocab_size=299, context_length=20, eos_id=1, pad_id=0)
    with pytest.raises(ValueError, match="has 300 ids, the model 299 embeddings"):
        load_tokenizer(tokenizer_model, small)
    with pytest.raises(ValueError, match="none.model: no such file or folder"):
        load_tokenizer(tmp_path / "none.model", small)
    with pytest.raises(
        ValueError, match="no tokenizer is stored with the weights, and 299 ids are not CLIP's own: give --tokenizer"
    ):
        load_tokenizer(None, small)
