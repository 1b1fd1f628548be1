"""The hf export is the model for transformers: features, tokens and pixels; what CLIPModel cannot express is rejected.

transformers comes with requirements-test.txt (from Python 3.11 on); the tests that load with it are skipped without.
"""

import importlib.util
import json
import unicodedata

import pytest
import torch
from PIL import Image

from infcl.convert.export import export_model
from infcl.data.tokenizer import Tokenizer, canonicalise, repair
from infcl.data.transforms import PillowTransform
from infcl.models import CLIP, load_model_config
from infcl.models.config import parse_model_config
from infcl.models.vision import normalize_pixels
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.open_clip_stub import import_transformers
from tests.lib.shard_files import picture
from tests.lib.small_clip import CONTEXT_LENGTH, small_config


@pytest.fixture(scope="module")
def exported(tokenizer_model, tmp_path_factory):
    torch.manual_seed(0)
    model = CLIP(small_config()).eval()
    folder = tmp_path_factory.mktemp("hf") / "export"
    export_model(model.state_dict(), model.cfg, tokenizer_model, folder, format="hf", name="tiny")
    return model, folder


def test_auto_tokenizer_reads_names_of_special_tokens_as_text(exported, tokenizer_model):
    theirs, texts = import_transformers().AutoTokenizer.from_pretrained(exported[1]), ["</s> is <unk> here_", "<pad>"]
    ids = theirs(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert torch.equal(ids, Tokenizer(tokenizer_model, CONTEXT_LENGTH)(texts))


MANY_ALIKE = ("CJK UNIFIED", "HANGUL SYLLABLE", "YI SYLLABLE")  # three quarters of the characters


@pytest.mark.parametrize(
    ("step", "every"),
    [(50, 4), pytest.param(50, 1, marks=pytest.mark.long), pytest.param(1, 1, marks=pytest.mark.slow)],
)
def test_raw_captions_are_cleaned_as_for_training_whatever_their_characters(exported, step, every):
    """What the tokenizer makes of a raw text is what it makes of the cleaned one; C1 controls are a wrong encoding."""
    clean = import_transformers().AutoTokenizer.from_pretrained(exported[1]).backend_tokenizer.normalizer.normalize_str
    letters = [chr(code) for code in range(1, 0x10000) if not 0x80 <= code < 0xA0]
    letters = [letter for letter in letters if unicodedata.category(letter) not in ("Cn", "Co", "Cs")]
    letters = [x for x in letters if not unicodedata.name(x, "").startswith(MANY_ALIKE) or ord(x) % step == 0]
    texts = [f"A{letter}b _ {letter}Σ{letter} Σ{letter}" for letter in letters[::every]]
    assert [text for text in texts if clean(text) != clean(canonicalise(repair(text)))] == []


def test_image_processor_gives_open_clips_pixels(exported):
    """Through Pillow, as transformers does it: equal to our Pillow path, normalised."""
    transformers = import_transformers()
    kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    processor = kind.from_pretrained(exported[1])
    for shape in ((48, 70), (90, 41), (32, 32)):
        image = Image.fromarray(picture(1, *shape))
        theirs = processor(image, return_tensors="pt").pixel_values
        ours = normalize_pixels(PillowTransform(32)(image)[None])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


STEM = load_model_config(GOLDEN_MODEL).to_dict()["vision_cfg"]


@pytest.mark.parametrize(
    ("vision", "text", "top", "message"),
    [
        ({"pool_type": "avg"}, {}, {}, "pool_type 'avg'"),
        ({}, {"pool_type": "last", "no_causal_mask": True}, {}, "pool_type 'last'.*; text_cfg.no_causal_mask"),
        ({}, {"eos_id": 2}, {}, "eos id 2"),
        ({}, {}, {"init_logit_bias": -10.0}, "init_logit_bias"),
        (STEM, {}, {}, "vision_cfg.conv_stem.*use --format open_clip"),
    ],
)
def test_what_clip_model_cannot_express_is_rejected_before_anything_is_written(vision, text, top, message, tmp_path):
    fields = {**small_config().to_dict(), **top}
    fields["vision_cfg"] |= vision
    fields["text_cfg"] |= text
    cfg = parse_model_config(fields)
    with pytest.raises(ValueError, match=f"CLIPModel cannot express this model: .*{message}"):
        export_model(CLIP(cfg).state_dict(), cfg, None, tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()


def test_card_shows_data_batch_settings_and_evaluation(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    flags = {"train_data": "/home/someone/sets/cc12m/{0..9}.tar", "batch_size": 64, "accum_freq": 4, "lr": 0.001}
    flags |= {"warmup": 10000, "lr_scaling": "sqrt"}
    (run / "config.json").write_text(json.dumps(flags))
    summary = {
        "steps": 1234,
        "samples_seen": 631808,
        "world_size": 2,
        "evaluation": {"zero_shot": {"top1": 0.5}, "retrieval": {"image_to_text_r1": 0.25, "val_loss": 1.5}},
        "paths": {"run": str(run)},
    }
    model = CLIP(small_config())
    export_model(model.state_dict(), model.cfg, None, tmp_path / "out", format="hf", name="mine", card=summary)
    card = (tmp_path / "out" / "README.md").read_text()
    for row in (
        "| data | cc12m/{0..9}.tar |", "| steps | 1,234 |", "| samples seen | 631,808 |",
        "| batch | 512 samples, one loss over all of them |", "| learning rate | 0.001 |",
        "| warm-up steps | 10000 |", "| scaled by the batch | sqrt |",
        "| zero shot top1 | 0.5 |", "| retrieval val loss | 1.5 |", "library_name: transformers",
    ):  # fmt: skip
        assert row in card, row
    assert "/home" not in card and str(tmp_path) not in card


@pytest.fixture
def bpe_cfg():
    """A model with CLIP's own vocabulary."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 1}
    return parse_model_config({"embed_dim": 24, "vision_cfg": vision, "text_cfg": text})


def test_without_open_clip_the_export_ends_before_it_writes_a_folder_without_a_tokenizer(
    bpe_cfg, tmp_path, monkeypatch
):
    """transformers answered each caption with [0, 2, 2, ...] from such a folder, and said nothing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: name != "open_clip" and find(name, *more) or None
    )
    with pytest.raises(ValueError, match="--format hf .* pip install open_clip_torch"):
        export_model(CLIP(bpe_cfg).state_dict(), bpe_cfg, None, tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()
