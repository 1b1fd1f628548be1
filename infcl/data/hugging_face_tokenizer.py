"""A Hugging Face tokenizer, for text towers that were made for one: `--tokenizer hf:NAME_OR_FOLDER`.

Captions are cleaned and padded as open_clip's HFTokenizer does it, so that an exported model sees the same ids. Nothing
that comes with a tokenizer is executed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PREFIX = "hf:"
_OPTIONS = ("clean", "strip_sep_token", "language")  # of text_cfg.tokenizer_kwargs; others could run code


class HuggingFaceTokenizer:
    """The interface of tokenizer.Tokenizer over a Hugging Face tokenizer.

    Args:
        name: name on the hub or a folder, with or without "hf:".
        context_length: tokens per caption.
        text_cfg: open_clip's, whose tokenizer_kwargs and tokenizer_mode are followed.

    Attributes: vocab_size, context_length, pad_id, eos_id, sha256 (of its vocabulary and settings), truncated.

    Raises:
        ValueError: it cannot be had, only by running code from it, or it has no padding token.
    """

    def __init__(self, name: str, context_length: int = 77, text_cfg: Mapping[str, Any] | None = None):
        self.name, self.context_length, self.truncated = name.removeprefix(PREFIX), context_length, 0
        self._text_cfg = dict(text_cfg or {})
        given = self._text_cfg.get("tokenizer_kwargs") or {}
        options = {key: given[key] for key in _OPTIONS if key in given}
        mode = self._text_cfg.get("tokenizer_mode")
        try:
            from open_clip.tokenizer import HFTokenizer

            self._tokenizer = HFTokenizer(
                self.name, context_length, tokenizer_mode=mode, trust_remote_code=False, **options
            )
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"--tokenizer {PREFIX}{self.name} needs open_clip and transformers: pip install open_clip_torch "
                f"transformers ({error})"
            ) from error
        except (OSError, ValueError) as error:
            why = str(error).split(" which must be executed")[0].splitlines()[0]
            raise ValueError(f"--tokenizer {PREFIX}{self.name}: {why}") from error
        inner: Any = self._tokenizer.tokenizer
        if inner.pad_token_id is None:
            raise ValueError(f"--tokenizer {PREFIX}{self.name} has no padding token")
        ends = [inner.eos_token_id, inner.sep_token_id]
        self.vocab_size, self.pad_id = len(inner), inner.pad_token_id
        self.eos_id = next((end for end in ends if end is not None), inner.pad_token_id)
        what = [sorted(inner.get_vocab().items()), options, mode, inner.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

    def __getstate__(self) -> tuple[str, int, dict[str, Any]]:
        return self.name, self.context_length, self._text_cfg

    def __setstate__(self, state: tuple[str, int, dict[str, Any]]) -> None:
        HuggingFaceTokenizer.__init__(self, *state)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """n captions -> int64 [n, context_length]; one that is too long is cut."""
        tokens = self._tokenizer(list(captions))
        full = (tokens[:, -1] != self.pad_id).nonzero().flatten().tolist()
        if full:
            longer = self._tokenizer([captions[i] for i in full], context_length=self.context_length + 1)
            self.truncated += int((longer[:, -1] != self.pad_id).sum())
        return tokens
