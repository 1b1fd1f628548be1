"""An exported folder is the model: for this package, for open_clip and for Hugging Face's tokenizers.

open_clip_torch and transformers come with requirements-test.txt (transformers from Python 3.11 on); a test that
misses its package is skipped. Alone: `python -m pytest tests/convert/test_export.py`.
"""

import hashlib
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from infcl.convert.__main__ import main
from infcl.convert.export import export_model, load_exported
from infcl.convert.export_tokenizer import read_model, sentencepiece_tokenizer
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import train_tokenizer
from infcl.models import CLIP, load_model_config
from infcl.models.preprocess import CLIP_PREPROCESS
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.manifests import manifest_of
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.small_clip import CAPTIONS, CONTEXT_LENGTH, TEXTS, small_config


@pytest.fixture(scope="module")
def exported(tokenizer_model, tmp_path_factory):
    torch.manual_seed(0)
    model = CLIP(small_config(init_logit_bias=-10.0)).eval()
    folder = tmp_path_factory.mktemp("run") / "export"
    export_model(model.state_dict(), model.cfg, tokenizer_model, folder, name="tiny")
    return model, folder


def test_open_clip_loads_the_folder_with_its_bias_and_pixels_and_repairs_texts(exported, tokenizer_model):
    open_clip = import_open_clip()
    pytest.importorskip("transformers")
    weights = load_file(exported[1] / "open_clip_model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32} and weights["logit_bias"].shape == ()
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{exported[1]}")
    assert theirs.logit_bias.item() == -10.0
    assert theirs.visual.preprocess_cfg["mean"] == list(CLIP_PREPROCESS.mean)
    assert "Resize(size=32, interpolation=bicubic" in str(preprocess)
    ids = open_clip.get_tokenizer(f"local-dir:{exported[1]}")(["caf\u00c3\u00a9"])
    assert torch.equal(ids, Tokenizer(tokenizer_model, CONTEXT_LENGTH)(["caf\u00e9"]))


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_tokenizer_json_gives_sentencepieces_ids(model_type, byte_fallback, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path / "t.model"
    vocab_size = 200 + 256 * byte_fallback
    train_tokenizer(CAPTIONS, path, vocab_size, model_type, byte_fallback=byte_fallback, num_threads=1)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = sentencepiece_tokenizer(read_model(path))
    draw = random.Random(0)
    noise = ["".join(draw.choices("abcdest  \t\u00e9\u65e5\u2581\ufb01\u00bd\U0001f600", k=30)) for _ in range(500)]
    texts = [*TEXTS, *CAPTIONS, *noise, "", "   ", "\u3000wide\u00a0spaces ", "\u2581", "x" * 300]
    for text, expected in zip(texts, reference.encode(texts)):
        ids = ours.encode(text).ids
        if model_type == "unigram" and ids != [*expected, 1]:  # a tie: the same pieces in another order
            ids, expected = sorted(ids[:-1]) + ids[-1:], sorted(expected)
        assert ids == [*expected, 1], text


def test_foreign_weights_and_tokenizers_are_rejected_before_anything_is_written(tokenizer_model, tmp_path):
    cfg, out = small_config(), tmp_path / "out"
    weights = dict(CLIP(cfg).state_dict())
    extra = {name: value for name, value in weights.items() if name != "visual.proj"} | {
        "extra": weights["logit_scale"]
    }
    with pytest.raises(ValueError, match=r"missing \['visual.proj'\], unknown \['extra'\]"):
        export_model(extra, cfg, None, out)
    with pytest.raises(ValueError, match=r"visual.proj has shape \(24, 32\), not \(32, 24\)"):
        export_model({**weights, "visual.proj": weights["visual.proj"].T}, cfg, None, out)
    other = cfg.with_tokenizer(vocab_size=301, context_length=CONTEXT_LENGTH, eos_id=1, pad_id=0)
    with pytest.raises(ValueError, match=r"\(300, 1, 0\), the model \(301, 1, 0\)"):
        export_model(CLIP(other).state_dict(), other, tokenizer_model, out)
    assert not out.exists()


def write_checkpoint(run, model):
    """Write step 3 of a run of `model`."""
    checkpoint = run / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True, exist_ok=True)
    file = checkpoint / "state_00000.safetensors"
    save_file({f"model/{name}": value for name, value in model.state_dict().items()}, file)
    entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (checkpoint / "infcl.json").write_text(json.dumps(manifest_of(3, {file.name: entry})))
    (run / "checkpoints" / "latest").write_text("step_00000003\n")
    (run / "model_config.json").write_text(model.cfg.to_json())
    return file, entry


def test_command_exports_the_last_checkpoint_of_a_run(tokenizer_model, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    model = CLIP(small_config())
    file, entry = write_checkpoint(run, model)
    (run / "tokenizer.model").write_bytes(tokenizer_model.read_bytes())
    command = ["export", str(run), "--out", str(out), "--name", "mine"]
    assert main(command) == 0
    assert torch.equal(load_exported(out)[0].visual.proj, model.visual.proj)
    card = (out / "README.md").read_text()
    assert card.count("# mine") == 1 and "| samples seen | 192 |" in card
    damaged = run / "checkpoints" / "step_00000004"
    damaged.mkdir()
    (damaged / "infcl.json").write_text(json.dumps(manifest_of(4, {file.name: entry})))
    (run / "summary.json").write_text(
        json.dumps({"steps": 4, "samples_seen": 256, "evaluation": {"zero_shot": {"top1": 0.5}}})
    )
    assert main(command) == 0
    assert (out / "README.md").read_text() == card, "it is of the checkpoint that was exported"
    assert main(["export", str(tmp_path / "nothing")]) == 2
    printed = capsys.readouterr()
    assert "nothing is no run folder" in printed.err
    write_checkpoint(run, CLIP(load_model_config(GOLDEN_MODEL)))
    assert main(["export", str(run)]) == 0
    card = (run / "export" / "README.md").read_text()
    assert "load_exported" in card and "local-dir" not in card
    assert main(["export", str(run), "--out", str(file)]) == 2
    assert "File exists" in capsys.readouterr().err
