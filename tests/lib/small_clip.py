"""A CLIP model small enough for tests, its captions, and the config of its sentencepiece tokenizer of 300 pieces."""

from infcl.data.tokenizer import canonicalise
from infcl.models import with_tokenizer
from infcl.models.config import CLIPConfig, parse_model_config
from tests.lib.checkout import ROOT

CONTEXT_LENGTH = 12
TEXTS = (ROOT / "LICENSE").read_text().split("\n\n")
CAPTIONS = [canonicalise(text) for text in TEXTS]


def small_config(**top) -> CLIPConfig:
    cfg = parse_model_config(
        {
            "embed_dim": 24,
            "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
            "text_cfg": {"context_length": CONTEXT_LENGTH, "vocab_size": 90, "width": 32, "heads": 4, "layers": 1},
            **top,
        }
    )
    return with_tokenizer(cfg, vocab_size=300, context_length=CONTEXT_LENGTH, eos_id=1, pad_id=0)
