"""Tokenizers of the installed open_clip: CLIP's byte-pair tokenizer and those of Hugging Face.

`--tokenizer open_clip:MODEL` selects the tokenizer of a built-in model of open_clip, and `--tokenizer
hf:NAME_OR_FOLDER` a tokenizer of Hugging Face. Captions are cleaned and padded as in open_clip, so that an exported
model gets the same ids.

The name may come from another user's run folder, so no code that comes with a tokenizer is executed. A model's name
only selects a JSON config in the installed package, which is read as data. open_clip.get_tokenizer is not called,
because it passes a folder's trust_remote_code to AutoTokenizer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infcl.data.tokenizer import Tokenizer
from infcl.models.open_clip_config import import_open_clip, open_clip_folder

PREFIX, HF_PREFIX = "open_clip:", "hf:"
_MAX_CACHE = 200_000  # words; open_clip's own cache has no limit
_OPTIONS = ("clean", "strip_sep_token", "language")  # accepted in text_cfg.tokenizer_kwargs; others could run code


class OpenClipTokenizer:
    """CLIP's byte-pair tokenizer, with the interface of `Tokenizer`. Ids are [start, ..., end, 0, ...], of 49,408.

    Args:
        name: "open_clip:MODEL", where MODEL is built into the installed open_clip.
        context_length: token positions per caption.

    Raises:
        ValueError: open_clip is missing, MODEL is not built in (a folder, a hub name), or it has another tokenizer.
    """

    def __init__(self, name: str, context_length: int = 77):
        installed = import_open_clip(f"--tokenizer {name}").tokenizer
        text = _built_in(name).get("text_cfg", {})
        if other := text.get("hf_tokenizer_name") or text.get("tokenizer_kwargs"):
            raise ValueError(f"--tokenizer {name}: it has another tokenizer ({other}), not CLIP's own")
        self._bpe = installed.SimpleTokenizer(context_length=context_length)
        self.name, self.context_length, self.truncated = name, context_length, 0
        self.vocab_size, self.pad_id, self.eos_id = self._bpe.vocab_size, 0, self._bpe.eot_token_id
        what = [self._bpe.clean_fn.__name__, sorted(self._bpe.encoder.items(), key=lambda item: item[1])]
        self.sha256 = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def __reduce__(self) -> tuple:
        return OpenClipTokenizer, (self.name, self.context_length)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Encode n captions to int64 [n, context_length]; longer captions are cut so that the end token stays last."""
        if len(self._bpe.cache) > _MAX_CACHE:
            self._bpe.cache = {token: token for token in list(self._bpe.cache)[: len(self._bpe.all_special_ids)]}
        tokens = torch.zeros(len(captions), self.context_length, dtype=torch.int64)
        for i, caption in enumerate(captions):
            ids = self._bpe.encode(caption)
            self.truncated += len(ids) > self.context_length - 2
            row = [self._bpe.sot_token_id, *ids[: self.context_length - 2], self.eos_id]
            tokens[i, : len(row)] = torch.tensor(row)
        return tokens


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer, with the interface of `Tokenizer`. sha256 is that of its vocabulary and settings.

    Args:
        name: name on the hub or a folder, with or without "hf:".
        context_length: token positions per caption.
        text_cfg: open_clip's text config; its tokenizer_kwargs and tokenizer_mode are used.

    Raises:
        ValueError: it cannot be loaded, needs to run its own code, or has no padding token.
    """

    def __init__(self, name: str, context_length: int = 77, text_cfg: Mapping[str, Any] | None = None):
        self.name, self.context_length, self.truncated = name.removeprefix(HF_PREFIX), context_length, 0
        self._text_cfg = dict(text_cfg or {})
        given = self._text_cfg.get("tokenizer_kwargs") or {}
        options = {key: given[key] for key in _OPTIONS if key in given}
        mode = self._text_cfg.get("tokenizer_mode")
        where = f"--tokenizer {HF_PREFIX}{self.name}"
        installed = import_open_clip(where).tokenizer
        try:
            self._tokenizer = installed.HFTokenizer(
                self.name, context_length, tokenizer_mode=mode, trust_remote_code=False, **options
            )
        except ImportError as error:
            raise ValueError(f"{where} needs transformers: pip install transformers ({error})") from error
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).split(" which must be executed")[0].splitlines()[0]
            raise ValueError(f"{where} is not a name on the hub or a folder with a tokenizer: {why}") from error
        inner: Any = self._tokenizer.tokenizer
        if inner.pad_token_id is None:
            raise ValueError(f"{where} has no padding token")
        self.vocab_size, self.pad_id = len(inner), inner.pad_token_id
        ends = [inner.eos_token_id, inner.sep_token_id, inner.pad_token_id]
        self.eos_id = next(end for end in ends if end is not None)
        what = [sorted(inner.get_vocab().items()), options, mode, inner.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

    def __reduce__(self) -> tuple:
        return HuggingFaceTokenizer, (self.name, self.context_length, self._text_cfg)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Encode n captions to int64 [n, context_length]; longer captions are cut."""
        tokens = self._tokenizer(list(captions))
        full = (tokens[:, -1] != self.pad_id).nonzero().flatten().tolist()
        if full:
            longer = self._tokenizer([captions[i] for i in full], context_length=self.context_length + 1)
            self.truncated += int((longer[:, -1] != self.pad_id).sum())
        return tokens


AnyTokenizer = Tokenizer | OpenClipTokenizer | HuggingFaceTokenizer


def open_clip_tokenizer(name: str, *, context_length: int) -> OpenClipTokenizer | HuggingFaceTokenizer:
    """Return the tokenizer of "open_clip:MODEL". Raises ValueError if there is no such model or tokenizer."""
    text_cfg = _built_in(name).get("text_cfg", {})
    if other := text_cfg.get("hf_tokenizer_name"):
        return HuggingFaceTokenizer(other, context_length, text_cfg)
    return OpenClipTokenizer(name, context_length)


def _built_in(name: str) -> dict[str, Any]:
    """Return the config of a built-in model of open_clip. Raises ValueError for any other name."""
    model = name.removeprefix(PREFIX).replace("/", "-")  # open_clip takes ViT-B/32 too
    configs = open_clip_folder() / "model_configs"
    if model not in {path.stem for path in configs.glob("*.json")}:
        raise ValueError(
            f"--tokenizer {name}: not a model that is built into open_clip, such as open_clip:ViT-B-32; for a folder "
            "give its path, or hf:FOLDER"
        )
    return json.loads((configs / f"{model}.json").read_text(encoding="utf-8"))
