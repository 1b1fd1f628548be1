"""Tokenizer: encode captions to token ids with sentencepiece.

In:  list of str.
Out: int64 [n, L]: ids, one eos, then padding. A caption that is too long is cut so that eos stays last.
Ids: pad 0, eos 1, unk 2, no bos (the layout of T5 and SigLIP). The text tower is causal and pools at the first eos, so
     the padding has no effect.

Captions are cleaned for training a tokenizer (learn.py) and for encoding, as with open_clip's clean="canonicalize".
Other tokenizers: open_clip.py. Which one a model has, and where that is recorded: source.py.
"""

import hashlib
import html
import os
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infcl.data.records import MAX_CAPTION_BYTES

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_LETTERS, _SYMBOLS = r"[^\W\d_]", r"(?:[^\w\s]|_)"
_LONG_WORD = re.compile(f"({_LETTERS}{{128}}){_LETTERS}+|({_SYMBOLS}{{128}}){_SYMBOLS}+")
_REMOVE_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


def cut_text(text: str) -> str:
    """Cut a text after 4 KB, and each run of letters or symbols after 128 characters, in which BPE is quadratic.

    Every tokenizer does this to every text first.
    """
    if len(text) > MAX_CAPTION_BYTES // 4:
        text = text[:MAX_CAPTION_BYTES].encode("utf-8", "replace")[:MAX_CAPTION_BYTES].decode("utf-8", "ignore")
    return _LONG_WORD.sub(r"\1\2", text)


def repair(caption: str) -> str:
    """'&quot;Caf\xe9&quot; \u2018\uff21\u2019' -> '"Caf\xe9" \'A\''; source: basic_clean of open_clip/tokenizer.py."""
    if caption.isascii() and caption.isprintable() and "&" not in caption:
        return caption  # ftfy would return the same, but takes 50 us
    import ftfy

    return html.unescape(html.unescape(ftfy.fix_text(caption)))


def canonicalise(caption: str) -> str:
    """'A_photo of  a Dog!' -> 'a photo of a dog'."""
    text = caption.encode("utf-8", "replace").decode()  # sentencepiece raises on a lone surrogate
    return " ".join(text.translate(_REMOVE_PUNCTUATION).lower().split())


def clean(caption: str, how: str) -> str:
    """Clean a caption as open_clip's tokenizers with clean=`how`: "whitespace", "lower" or "canonicalize"."""
    caption = repair(caption)
    if how == "canonicalize":
        return canonicalise(caption)
    text = " ".join(caption.encode("utf-8", "replace").decode().split())  # tokenizers raise on a lone surrogate
    return text.lower() if how == "lower" else text


def padded(rows: Sequence[Sequence[int]], length: int, pad_id: int) -> torch.Tensor:
    """Return n rows of at most `length` ids as int64 [n, length], padded at the end."""
    tokens = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens


def ids_of(tokenizer: Any) -> dict[str, Any]:
    """Return the ids that a text tower needs to know of a tokenizer: arguments of the configs' `with_tokenizer`."""
    return {name: getattr(tokenizer, name) for name in ("vocab_size", "context_length", "eos_id", "pad_id")}


class Tokenizer:
    """A sentencepiece model with a context length. It pickles as bytes, so workers need no file.

    Args:
        context_length: token positions per caption, including eos.

    Attributes: vocab_size, context_length, pad_id, eos_id, sha256 (of the model file), truncated (number of captions
    that this instance has cut so far).

    Raises:
        ValueError: the file is no sentencepiece model, or has other ids for pad and eos.
    """

    def __init__(self, model_path: str | os.PathLike, context_length: int = 64):
        import sentencepiece

        if context_length < 2:
            raise ValueError(f"context length {context_length} leaves no room for a token and eos")
        try:
            self._model = Path(model_path).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except (OSError, RuntimeError) as error:  # sentencepiece raises RuntimeError for a file of another format
            why = error.strerror if isinstance(error, OSError) else "it cannot be parsed"
            raise ValueError(f"tokenizer {model_path} is no sentencepiece model ({why})") from error
        self.context_length, self.truncated = context_length, 0
        self.vocab_size = self._processor.vocab_size()
        self.pad_id, self.eos_id = self._processor.pad_id(), self._processor.eos_id()
        self.sha256 = hashlib.sha256(self._model).hexdigest()
        if (self.pad_id, self.eos_id) != (PAD_ID, EOS_ID):
            raise ValueError(
                f"the tokenizer has pad id {self.pad_id} and eos id {self.eos_id}, not {PAD_ID} and {EOS_ID}: "
                f"train one with `python -m infcl.data.tokenizer train`"
            )

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Encode n captions to int64 [n, context_length]."""
        ids = self._processor.encode([clean(cut_text(text), "canonicalize") for text in captions], num_threads=1)
        room = self.context_length - 1
        self.truncated += sum(len(row) > room for row in ids)
        return padded([[*row[:room], self.eos_id] for row in ids], self.context_length, self.pad_id)

    def save(self, folder: Path) -> None:
        """Write the model file, byte for byte, as tokenizer.model."""
        (folder / "tokenizer.model").write_bytes(self._model)
