"""A sentencepiece model as Hugging Face's tokenizer.json, written without the tokenizers or transformers packages.

In:  a BPE or unigram .model whose ids pad, eos and unk are set.
Out: spiece.model (a copy), tokenizer.json, tokenizer_config.json. AutoTokenizer and open_clip's get_tokenizer load them
     and return the ids of sentencepiece, followed by eos and padding.

transformers' own conversions are not exact: T5TokenizerFast drops the leading U+2581, the slow T5Tokenizer loses byte
fallback, and 5.x accepts no .model file. Here BPE is exact, and unigram is exact except for ties. Two orders of the
same pieces ("00" "0" or "0" "00") can have equal scores; sentencepiece then chooses by float32 rounding over the text.

    text -> charsmap of the model, strip, collapse spaces -> U+2581 for spaces and in front -> BPE | unigram -> ... eos
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # ModelProto.SentencePiece.Type
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_SPACE = "\u2581"
LOWER_STEPS = [  # "Lowercase" works letter by letter, but str.lower writes a final sigma at the end of a word
    {"type": "Replace", "pattern": {"Regex": r"(?<=[\p{Lu}\p{Ll}\p{Lt}])Σ(?![\p{Lu}\p{Ll}\p{Lt}])"}, "content": "ς"},
    {"type": "Lowercase"},
]


def export_tokenizer(model_path: str | Path, out_dir: str | Path, *, context_length: int) -> None:
    """Write spiece.model, tokenizer.json and tokenizer_config.json.

    Args:
        model_path: sentencepiece file.
        out_dir: folder to write into.
        context_length: tokens of a caption, model_max_length of the tokenizer.

    Raises:
        ValueError: tokenizer.json cannot express the model exactly.
    """
    proto = read_model(model_path)
    out = Path(out_dir)
    trainer = proto.trainer_spec
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": trainer.eos_piece,
        "pad_token": trainer.pad_piece,
        "unk_token": trainer.unk_piece,
        "model_max_length": context_length,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids"],
    }
    shutil.copyfile(model_path, out / "spiece.model")
    (out / "tokenizer.json").write_text(json.dumps(tokenizer_json(proto), ensure_ascii=False), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_model(model_path: str | Path) -> Any:
    """Read the ModelProto of a .model file."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at import
    proto.ParseFromString(Path(model_path).read_bytes())
    return proto


def tokenizer_json(proto: Any) -> dict[str, Any]:
    """Return the content of tokenizer.json for a ModelProto.

    Raises:
        ValueError: tokenizer.json cannot express the model exactly.
    """
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"sentencepiece model type {trainer.model_type}: only unigram (1) and BPE (2) can be exported")
    if min(trainer.pad_id, trainer.eos_id, trainer.unk_id) < 0:
        raise ValueError(
            f"the tokenizer lacks a special token: pad {trainer.pad_id}, eos {trainer.eos_id}, unk {trainer.unk_id}"
        )
    if trainer.treat_whitespace_as_suffix or not (
        normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces and normalizer.escape_whitespaces
    ):
        raise ValueError("only sentencepiece's default treatment of white space can be exported")
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always",
        "split": trainer.split_by_whitespace,
    }
    eos = {"SpecialToken": {"id": trainer.eos_piece, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": piece.piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece.type != _USER_DEFINED,
            }
            for i, piece in enumerate(proto.pieces)
            if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer)},
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, eos],
            "pair": [first, eos, second, eos],
            "special_tokens": {
                trainer.eos_piece: {
                    "id": trainer.eos_piece,
                    "ids": [trainer.eos_id],
                    "tokens": [trainer.eos_piece],
                }
            },
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]},
        "model": _bpe(proto) if trainer.model_type == _BPE else _unigram(proto),
    }


def repair_steps() -> list[dict[str, Any]]:
    """Return normalizers that repair captions like ftfy and html.unescape, as far as tokenizer.json can express it.

    They handle common entities, ligatures, full-width forms, typographic quotes, line breaks, control characters and
    NFC. Other entities, terminal codes and text in a wrong encoding do not change.
    """
    from ftfy import chardata

    def replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    entities = {"&(amp;)+": "&", "&lt;": "<", "&gt;": ">", "&quot;|&#0*34;": '"', "&apos;|&#0*39;|&#x27;": "'"}
    entities["&nbsp;|&#160;"] = "\u00a0"
    letters = chardata.LIGATURES | chardata.WIDTH_MAP
    quotes = {chardata.SINGLE_QUOTE_RE.pattern: "'", chardata.DOUBLE_QUOTE_RE.pattern: '"'}
    removed = "".join(rf"\x{{{code:x}}}" for code in chardata.CONTROL_CHARS)
    return [
        *(replace("Regex", pattern, content) for pattern, content in entities.items()),
        *(replace("String", chr(code), content) for code, content in letters.items()),
        *(replace("Regex", pattern, content) for pattern, content in quotes.items()),
        replace("Regex", r"\r|\x{2028}|\x{2029}|\x{85}", " "),
        replace("Regex", f"[{removed}]", ""),
        {"type": "NFC"},
    ]


def _normalizers(spec: Any) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _unigram(proto: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "vocab": [[piece.piece, piece.score] for piece in proto.pieces],
        "byte_fallback": proto.trainer_spec.byte_fallback,
    }


def _bpe(proto: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": proto.trainer_spec.unk_piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: i for i, piece in enumerate(proto.pieces)},
        "merges": _merges(proto),
    }


def _merges(proto: Any) -> list[list[str]]:
    """Return every pair that forms a piece, best piece first: sentencepiece ranks a pair by the piece it would form."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    ranked = []
    for text, i in ids.items():
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        for left, right in pairs:
            if left in ids and right in ids:
                ranked.append((-proto.pieces[i].score, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(ranked)]
