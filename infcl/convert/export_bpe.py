"""CLIP's own byte-pair tokenizer as Hugging Face's tokenizer.json, from the merges that open_clip ships.

It serves transformers exports of models that were trained with --tokenizer open_clip:MODEL. The ids are those of
SimpleTokenizer (open_clip/tokenizer.py), [start, ..., end]. Padding repeats the end, which changes no feature because
the causal text tower pools at the first end. Captions are repaired as far as tokenizer.json can express it
(repair_steps), then lowercased.
"""

import gzip
import importlib.util
import json
from pathlib import Path

from infcl.convert.export_tokenizer import LOWER_STEPS, repair_steps

_START, _END = "<start_of_text>", "<end_of_text>"
_MERGES = 49152 - 256 - 2
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def read_merges() -> list[list[str]]:
    """Read the merges of the installed open_clip, in order of rank, without importing its package.

    Raises:
        ValueError: open_clip is not installed.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or spec.origin is None:
        raise ValueError(
            "--format hf of a model with CLIP's own tokenizer needs its vocabulary, which open_clip ships: "
            "pip install open_clip_torch (--format open_clip needs none)"
        )
    merges_file = Path(spec.origin).with_name("bpe_simple_vocab_16e6.txt.gz")
    lines = gzip.decompress(merges_file.read_bytes()).decode("utf-8").split("\n")
    return [line.split() for line in lines[1 : _MERGES + 1]]


def export_bpe(merges: list[list[str]], out: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        merges: merges of `read_merges`.
        out: folder to write into.
        context_length: tokens of a caption, model_max_length of the tokenizer.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START,
        "eos_token": _END,
        "pad_token": _END,
        "unk_token": _END,
        "model_max_length": context_length,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids"],
    }
    (out / "tokenizer.json").write_text(json.dumps(_tokenizer(merges), ensure_ascii=False), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tokenizer(merges: list[list[str]]) -> dict[str, object]:
    letters = _byte_letters()
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges), _START, _END]
    ids = {word: i for i, word in enumerate(words)}
    start, end = ({"SpecialToken": {"id": token, "type_id": 0}} for token in (_START, _END))
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token} | flags for token in (_START, _END)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *repair_steps(),
                *LOWER_STEPS,
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, first, end],
            "pair": [start, first, end, second, end],
            "special_tokens": {
                token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (_START, _END)
            },
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _END,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "fuse_unk": False,
            "vocab": ids,
            "merges": merges,
        },
    }


def _byte_letters() -> list[str]:
    """Return GPT-2's letters for the 256 bytes in the order of CLIP's vocabulary: printable bytes come first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
