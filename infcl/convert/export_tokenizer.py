"""Tokenizers as Hugging Face's tokenizer.json, which AutoTokenizer and open_clip's get_tokenizer load.

    a sentencepiece model    sentencepiece_tokenizer    [..., eos]; BPE or unigram, with pad, eos and unk set
    CLIP's own BPE           clip_tokenizer             [start, ..., end], from the merges that open_clip ships
    Hugging Face's           hugging_face_tokenizer     its own, with the cleaning of captions in front

transformers' own conversions of sentencepiece models are not exact: T5TokenizerFast drops the leading U+2581, the slow
T5Tokenizer loses byte fallback, and 5.x accepts no .model file. Here BPE is exact, and unigram is exact except for
ties. Two orders of the same pieces ("00" "0" or "0" "00") can have equal scores; sentencepiece then chooses by float32
rounding over the text.

    text -> charsmap of the model, strip, collapse spaces -> U+2581 for spaces and in front -> BPE | unigram -> ... eos
"""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from infcl.data.tokenizer.open_clip import PROBES, HuggingFaceTokenizer
from infcl.data.tokenizer.source import TokenizerSource
from infcl.models.open_clip_config import open_clip_folder

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # ModelProto.SentencePiece.Type
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_SPACE = "\u2581"
_START, _END = "<start_of_text>", "<end_of_text>"
CLIP_TOKENS = {"bos_token": _START, "eos_token": _END, "pad_token": _END, "unk_token": _END}
_CLIP_MERGES = 49152 - 256 - 2
_CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# Lowercase works letter by letter, but str.lower writes a final sigma at the end of a word.
_FINAL_SIGMA = Regex(r"(?<=[\p{Lu}\p{Ll}\p{Lt}])Σ(?![\p{Lu}\p{Ll}\p{Lt}])")


def export_tokenizer(source: TokenizerSource, out: Path, context_length: int, *, takes_raw_text: bool) -> None:
    """Write the files of a tokenizer into an exported folder: tokenizer.json, tokenizer_config.json and others.

    Args:
        out: folder to write into; it is made once the tokenizer is ready.
        takes_raw_text: the files clean captions as training does. Where that removes punctuation, they also read
            "</s>" and the like as text, since they would end the caption. False: the caller cleans captions, and has
            CLIP's own tokenizer.

    Raises:
        ValueError: the files cannot express the tokenizer exactly.
    """
    how = source.kwargs.get("clean", "lower" if source.kind == "clip" else "whitespace") if takes_raw_text else None
    if source.kind == "sentencepiece":
        proto = read_model(source.where)
        trainer, tokenizer = proto.trainer_spec, sentencepiece_tokenizer(proto, cleaning_steps(how))
        names = {"eos_token": trainer.eos_piece, "pad_token": trainer.pad_piece, "unk_token": trainer.unk_piece}
    elif source.kind == "clip":
        tokenizer, names = clip_tokenizer(cleaning_steps(how)), CLIP_TOKENS
    else:
        theirs = source.open(context_length)
        assert isinstance(theirs, HuggingFaceTokenizer)
        if not takes_raw_text:
            theirs.save(out, ".")
            return
        tokenizer = hugging_face_tokenizer(theirs, cleaning_steps(how))
        names = {name: token for name, token in theirs.inner.special_tokens_map.items() if isinstance(token, str)}
    out.mkdir(parents=True, exist_ok=True)
    if source.kind == "sentencepiece":
        shutil.copyfile(source.where, out / "spiece.model")
    write_tokenizer(tokenizer, out, names, context_length, reads_special_as_text=how == "canonicalize")


def write_tokenizer(
    tokenizer: Tokenizer, out: Path, names: dict[str, str], context_length: int, reads_special_as_text: bool = False
) -> None:
    """Write tokenizer.json and tokenizer_config.json. `names` are those of the special tokens."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": context_length,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids"],
        "split_special_tokens": reads_special_as_text,
    }
    (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_model(model_path: str | Path) -> Any:
    """Read the ModelProto of a .model file."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at import
    proto.ParseFromString(Path(model_path).read_bytes())
    return proto


def sentencepiece_tokenizer(proto: Any, cleaning: Sequence[normalizers.Normalizer] = ()) -> Tokenizer:
    """Return the tokenizer of a ModelProto, which first applies the `cleaning`.

    Raises:
        ValueError: tokenizer.json cannot express the model exactly.
    """
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"sentencepiece model type {trainer.model_type}: only unigram (1) and BPE (2) can be exported")
    if min(trainer.pad_id, trainer.eos_id, trainer.unk_id) < 0:
        raise ValueError(
            f"the tokenizer lacks a special token: pad {trainer.pad_id}, eos {trainer.eos_id}, unk {trainer.unk_id}"
        )
    if trainer.treat_whitespace_as_suffix or not (
        spec.add_dummy_prefix and spec.remove_extra_whitespaces and spec.escape_whitespaces
    ):
        raise ValueError("only sentencepiece's default treatment of white space can be exported")
    model: models.Model
    if trainer.model_type == _BPE:
        model = models.BPE(
            {piece.piece: i for i, piece in enumerate(proto.pieces)},
            _merges(proto),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    else:
        vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
        model = models.Unigram(vocabulary, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    tokenizer = Tokenizer(model)
    for piece in proto.pieces:
        if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = piece.type != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False, special=special)])
    charsmap = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [*cleaning, *charsmap, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, split=trainer.split_by_whitespace)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(_SPACE, split=trainer.split_by_whitespace)]
    )
    eos = trainer.eos_piece
    tokenizer.post_processor = TemplateProcessing(["$A", eos], ["$A", eos, "$B", eos], [(eos, trainer.eos_id)])
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair that forms a piece, best piece first: sentencepiece ranks a pair by the piece it would form."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    ranked = []
    for text, i in ids.items():
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        for left, right in pairs:
            if left in ids and right in ids:
                ranked.append((-proto.pieces[i].score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def hugging_face_tokenizer(theirs: HuggingFaceTokenizer, cleaning: Sequence[normalizers.Normalizer]) -> Tokenizer:
    """Return a tokenizer of Hugging Face that first applies the `cleaning`.

    Raises:
        ValueError: tokenizer.json cannot express it exactly.
    """
    why = ""
    if theirs.strips_sep or theirs.mode:
        why = f"{'strip_sep_token' if theirs.strips_sep else f'tokenizer_mode {theirs.mode}'} changes its ids"
    elif not hasattr(theirs.inner, "backend_tokenizer"):
        why = "transformers has only its Python code"
    else:
        tokenizer = Tokenizer.from_str(theirs.inner.backend_tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.enable_truncation(theirs.context_length)
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([*cleaning, *own])
        if [tokenizer.encode(text).ids for text in PROBES] == theirs.rows(PROBES):
            tokenizer.no_truncation()
            return tokenizer
        why = "with the cleaning of captions its ids are others"
    raise ValueError(f"tokenizer {theirs.name} cannot be exported for transformers: {why}; use --format open_clip")


def clip_tokenizer(cleaning: Sequence[normalizers.Normalizer]) -> Tokenizer:
    """Return CLIP's own byte-pair tokenizer, for models that were trained with --tokenizer open_clip:MODEL.

    The ids are those of SimpleTokenizer (open_clip/tokenizer.py) after the `cleaning`. Padding repeats the end, which
    changes no feature because the causal text tower pools at the first end.

    Raises:
        ValueError: open_clip is not installed.
    """
    vocabulary = open_clip_folder("--format hf with CLIP's own tokenizer") / "bpe_simple_vocab_16e6.txt.gz"
    lines = gzip.decompress(vocabulary.read_bytes()).decode("utf-8")
    merges = [(left, right) for left, right in (line.split() for line in lines.split("\n")[1 : _CLIP_MERGES + 1])]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for the 256 bytes
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges), _START, _END]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=_END, end_of_word_suffix="</w>"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (_START, _END)])
    tokenizer.normalizer = normalizers.Sequence(list(cleaning))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_WORDS), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [(token, ids[token]) for token in (_START, _END)]
    tokenizer.post_processor = TemplateProcessing([_START, "$A", _END], [_START, "$A", _END, "$B", _END], special)
    return tokenizer


def cleaning_steps(how: str | None) -> list[normalizers.Normalizer]:
    """Return normalizers that clean captions as infcl.data.tokenizer.clean does, as far as they can; None: none.

    White space is what Python counts as such; a sentencepiece model's charsmap would remove some of it.
    """
    if how is None:
        return []
    steps = [*repair_steps(), normalizers.Replace(Regex(r"[\s\x0b\x1c-\x1f\x{85}]+"), " ")]
    if how == "canonicalize":  # '_' becomes a space, other ASCII punctuation is removed
        steps += [normalizers.Replace("_", " "), normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), "")]
        steps += [normalizers.Replace(Regex(" {2,}"), " ")]
    if how != "whitespace":  # lowercase as str.lower does
        steps += [normalizers.Replace(_FINAL_SIGMA, "ς"), normalizers.Lowercase()]
    return [*steps, normalizers.Strip()]


def repair_steps() -> list[normalizers.Normalizer]:
    """Return normalizers that repair captions like ftfy and html.unescape, as far as tokenizer.json can express it.

    They handle common entities, ligatures, full-width forms, typographic quotes, line breaks, control characters and
    NFC. Other entities, terminal codes and text in a wrong encoding do not change.
    """
    from ftfy import chardata

    entities = {"&(amp;)+": "&", "&lt;": "<", "&gt;": ">", "&quot;|&#0*34;": '"', "&apos;|&#0*39;|&#x27;": "'"}
    entities["&nbsp;|&#160;"] = "\u00a0"
    letters = chardata.LIGATURES | chardata.WIDTH_MAP
    removed = "".join(rf"\x{{{code:x}}}" for code in chardata.CONTROL_CHARS)
    return [
        *(normalizers.Replace(Regex(pattern), content) for pattern, content in entities.items()),
        *(normalizers.Replace(chr(code), content) for code, content in letters.items()),
        normalizers.Replace(Regex(chardata.SINGLE_QUOTE_RE.pattern), "'"),
        normalizers.Replace(Regex(chardata.DOUBLE_QUOTE_RE.pattern), '"'),
        normalizers.Replace(Regex(r"\r|\x{2028}|\x{2029}|\x{85}"), " "),
        normalizers.Replace(Regex(f"[{removed}]"), ""),
        normalizers.NFC(),
    ]
