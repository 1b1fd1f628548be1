"""A CLIP model small enough for tests, its captions, and the config of its sentencepiece tokenizer of 300 pieces."""

from infcl.data.tokenizer import canonicalise
from infcl.models.config import CLIPConfig, parse_model_config
from tests.lib.checkout import ROOT

CONTEXT_LENGTH = 12
TEXTS = (ROOT / "LICENSE").read_text().split("\n\n")
CAPTIONS = [canonicalise(text) for text in TEXTS]
# Seven languages, with typographic quotes, full-width and half-width forms, ligatures and entities, as in web captions.
LANGUAGES = [
    "\u201c\uff28\uff45\uff4c\uff4c\uff4f\u201d &amp;amp; Tom &amp; \u2018Jerry\u2019 &lt;3 don&#39;t",
    "l\u2019\u00c9t\u00e9, cafe\u0301 \ufb01n&nbsp;\u00ab z \u00bb &quot;x&quot;",
    "Stra\u00dfe \u2013 \u201egro\u00df\u201c",
    "\u0421\u043e\u0431\u0430\u043a\u0430 \u201e\u0411\u043e\u043b\u044c\u0448\u0430\u044f\u201c",
    "\u732b\u306e\u5199\u771f\uff01\u300c\uff76\uff9e\uff11\u300d",
    "\uace0\uc591\uc774\uff0c \u201c\uac1c\u201d",
    "\u0643\u0644\u0628 \u201c\u0628\u0646\u064a\u201d",
]


def small_config(**top) -> CLIPConfig:
    cfg = parse_model_config(
        {
            "embed_dim": 24,
            "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
            "text_cfg": {"context_length": CONTEXT_LENGTH, "vocab_size": 90, "width": 32, "heads": 4, "layers": 1},
            **top,
        }
    )
    return cfg.with_tokenizer(vocab_size=300, context_length=CONTEXT_LENGTH, eos_id=1, pad_id=0)
