"""Tokenizers of open_clip's models: CLIP's byte-pair tokenizer and those of Hugging Face.

Both have the interface of `Tokenizer`, and give open_clip's ids for the same settings. source.py chooses one.

The name may come from another user's run folder, so no code that comes with a tokenizer is executed:
open_clip.get_tokenizer, which passes a folder's trust_remote_code to AutoTokenizer, is not called.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl.data.tokenizer import Tokenizer, clean, cut_text, padded
from infcl.models.open_clip_config import import_open_clip

PREFIX, HF_PREFIX = "open_clip:", "hf:"
HF_FOLDER = "tokenizer"  # in a run folder
_NO_LIMIT = 1 << 40
_MAX_CACHE = 200_000  # words; open_clip's own cache has no limit
PROBES = ["a", "A photo of a DOG, 3/4 l\u00e9ft!", "", "\u732b \U0001f600", "a b c d e f g "]


class OpenClipTokenizer:
    """CLIP's byte-pair tokenizer. Ids are [start, ..., end, 0, ...], of 49,408.

    Args:
        how: how captions are cleaned (`clean`).

    Raises:
        ValueError: open_clip is missing.
    """

    def __init__(self, context_length: int = 77, how: str = "lower"):
        installed = import_open_clip("CLIP's own tokenizer").tokenizer
        self._bpe = installed.SimpleTokenizer(context_length=context_length, clean=how)
        self.context_length, self.how, self.truncated = context_length, how, 0
        self.vocab_size, self.pad_id, self.eos_id = self._bpe.vocab_size, 0, self._bpe.eot_token_id
        what = [self._bpe.clean_fn.__name__, sorted(self._bpe.encoder.items(), key=lambda item: item[1])]
        self.sha256 = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def __reduce__(self) -> tuple:
        return OpenClipTokenizer, (self.context_length, self.how)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Encode n captions to int64 [n, context_length]; longer captions are cut so that the end token stays last."""
        if len(self._bpe.cache) > _MAX_CACHE:
            self._bpe.cache = {token: token for token in list(self._bpe.cache)[: len(self._bpe.all_special_ids)]}
        room, rows = self.context_length - 2, [self._bpe.encode(cut_text(caption)) for caption in captions]
        self.truncated += sum(len(ids) > room for ids in rows)
        rows = [[self._bpe.sot_token_id, *ids[:room], self.eos_id] for ids in rows]
        return padded(rows, self.context_length, self.pad_id)

    def save(self, folder: Path) -> None:
        """Write nothing: open_clip ships this tokenizer."""


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer, with the ids of open_clip's HFTokenizer. Padding and truncation are on the right.

    Args:
        name: name on the hub or a folder, with or without "hf:".
        text_cfg: open_clip's text config. Of its tokenizer_kwargs, `clean` (default "whitespace"; None: captions are
            taken as they are), `strip_sep_token` and `language` are used; and its tokenizer_mode.

    Attributes: those of `Tokenizer`. eos_id is the id that ends every caption and occurs nowhere else in it, or None.

    Raises:
        ValueError: it cannot be loaded, needs to run its own code, or has no padding token.
    """

    def __init__(self, name: str, context_length: int = 77, text_cfg: Mapping[str, Any] | None = None):
        self.name, self.context_length, self.truncated = name.removeprefix(HF_PREFIX), context_length, 0
        self._text_cfg = dict(text_cfg or {})
        self.mode, options = self._text_cfg.get("tokenizer_mode"), self._text_cfg.get("tokenizer_kwargs") or {}
        self.how, self.strips_sep = options.get("clean", "whitespace"), bool(options.get("strip_sep_token"))
        where = f"--tokenizer {HF_PREFIX}{self.name}"
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as open_clip does: its threads do not survive a fork
        try:
            from transformers import AutoTokenizer

            self.inner: Any = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)  # None would prompt
        except ImportError as error:
            raise ValueError(f"{where} needs transformers: pip install transformers ({error})") from error
        except (OSError, ValueError, RuntimeError) as error:
            if "must be executed" in str(error):  # without transformers' advice to run the code
                raise ValueError(f"{where}: its tokenizer cannot be opened without running code from it") from error
            why = str(error).splitlines()[0]
            raise ValueError(f"{where} is not a name on the hub or a folder with a tokenizer: {why}") from error
        if self.inner.pad_token_id is None:
            raise ValueError(f"{where} has no padding token")
        self.inner.padding_side = self.inner.truncation_side = "right"
        self.inner.model_max_length = _NO_LIMIT  # no warning about long captions, which are cut and counted here
        if options.get("language") is not None and hasattr(self.inner, "set_src_lang_special_tokens"):
            self.inner.set_src_lang_special_tokens(options["language"])
        self.vocab_size, self.pad_id = len(self.inner), self.inner.pad_token_id
        self.eos_id = self._end()
        what = [_definition(self.inner), options, self.mode, self.inner.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

    def __reduce__(self) -> tuple:
        return HuggingFaceTokenizer, (self.name, self.context_length, self._text_cfg)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Encode n captions to int64 [n, context_length]; longer captions are cut so that an end token stays last."""
        tokens = padded(self.rows(captions), self.context_length, self.pad_id)
        if self.strips_sep:
            tokens[tokens == self.inner.sep_token_id] = 0
        return tokens

    def rows(self, captions: Sequence[str]) -> list[list[int]]:
        """Return each caption's ids without padding, at most context_length; count those that were cut."""
        texts = [text if self.how is None else clean(text, self.how) for text in map(cut_text, captions)]
        if not texts:
            return []
        if self.mode == "clips":  # [bos, ..., eos, pad, ..., cls]
            room, inner = self.context_length - 3, self.inner
            plain = inner(texts, add_special_tokens=False)["input_ids"]
            self.truncated += sum(len(ids) > room for ids in plain)
            rows = [[inner.bos_token_id, *ids[:room], inner.eos_token_id] for ids in plain]
            return [row + [self.pad_id] * (room + 2 - len(row)) + [inner.cls_token_id] for row in rows]
        rows = self.inner(texts)["input_ids"]
        if long := [i for i, row in enumerate(rows) if len(row) > self.context_length]:
            self.truncated += len(long)
            cut = self.inner([texts[i] for i in long], truncation=True, max_length=self.context_length)["input_ids"]
            for i, row in zip(long, cut):
                rows[i] = row
        return rows

    def _end(self) -> int | None:
        """Return the id that ends every caption, long and short, and occurs nowhere else in it; None without one."""
        rows = self.rows([*PROBES, "a " * (self.context_length + 1)])
        self.truncated = 0  # these are no captions
        end = rows[0][-1] if rows[0] else -1
        is_stripped = self.strips_sep and end == self.inner.sep_token_id
        return end if not is_stripped and all(row[-1:] == [end] and row.count(end) == 1 for row in rows) else None

    def save(self, folder: Path, name: str = HF_FOLDER) -> None:
        """Write its files to folder/name, in a run folder HF_FOLDER. Raises ValueError if they give other ids."""
        with tempfile.TemporaryDirectory() as new:
            self.inner.model_max_length = self.context_length
            self.inner.save_pretrained(new)
            self.inner.model_max_length = _NO_LIMIT
            stored = HuggingFaceTokenizer(new, self.context_length, self._text_cfg)
            if not torch.equal(stored(PROBES), self(PROBES)):
                raise ValueError(f"tokenizer {self.name}: the files that transformers writes of it give other ids")
            shutil.copytree(new, folder / name, dirs_exist_ok=True)


AnyTokenizer = Tokenizer | OpenClipTokenizer | HuggingFaceTokenizer


def _definition(inner: Any) -> Any:
    """Return what determines the ids of a tokenizer, as far as it can be read: tokenizer.json, or the vocabulary."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        return sorted(inner.get_vocab().items())
    return {key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")}
