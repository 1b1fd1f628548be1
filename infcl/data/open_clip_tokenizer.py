"""CLIP's own byte-pair tokenizer, from open_clip where it is installed: to fine-tune weights that were trained with it.

`--tokenizer open_clip:<model>`, e.g. open_clip:ViT-B-32. Ids: [start, ..., end, 0, ...], 49,408 of them; the text tower
pools at the largest id, which is the end. Ten times slower than sentencepiece, and still a small part of a decode.

The name may come from a run folder of someone else, so it only selects one of the JSON configs inside the installed
package, which is read as data. open_clip.get_tokenizer is not called: its `local-dir:` and `hf-hub:` names forward the
folder's tokenizer_kwargs, trust_remote_code among them, to AutoTokenizer (open_clip/factory.py).
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from infcl.data.hugging_face_tokenizer import HuggingFaceTokenizer
from infcl.data.tokenizer import Tokenizer
from infcl.models.open_clip_config import open_clip_folder

PREFIX = "open_clip:"
_MAX_CACHE = 200_000  # words; open_clip's own cache grows without end


class OpenClipTokenizer:
    """The interface of tokenizer.Tokenizer over open_clip's.

    Args:
        name: "open_clip:MODEL", where MODEL is built into the installed open_clip.
        context_length: tokens per caption.

    Raises:
        ValueError: open_clip is missing, MODEL is not built in (a folder, a hub name), or it has another tokenizer.
    """

    def __init__(self, name: str, context_length: int = 77):
        try:
            from open_clip import tokenizer as installed
        except ModuleNotFoundError as error:
            raise ValueError(f"--tokenizer {name} needs open_clip: pip install open_clip_torch ({error})") from error
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"--tokenizer {name}: open_clip is installed but cannot be imported ({error}); are torch and "
                "torchvision of one build (CPU or CUDA)?"
            ) from error
        text = _built_in(name).get("text_cfg", {})
        if other := text.get("hf_tokenizer_name") or text.get("tokenizer_kwargs"):
            raise ValueError(f"--tokenizer {name}: it has another tokenizer ({other}), not CLIP's own")
        self._bpe = installed.SimpleTokenizer(context_length=context_length)
        self.name, self.context_length, self.truncated = name, context_length, 0
        self.vocab_size, self.pad_id, self.eos_id = self._bpe.vocab_size, 0, self._bpe.eot_token_id
        what = [self._bpe.clean_fn.__name__, sorted(self._bpe.encoder.items(), key=lambda item: item[1])]
        self.sha256 = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def __getstate__(self) -> tuple[str, int]:
        return self.name, self.context_length

    def __setstate__(self, state: tuple[str, int]) -> None:
        OpenClipTokenizer.__init__(self, *state)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """n captions -> int64 [n, context_length]; one that is too long is cut so that the end stays last."""
        if len(self._bpe.cache) > _MAX_CACHE:
            self._bpe.cache = {token: token for token in list(self._bpe.cache)[: len(self._bpe.all_special_ids)]}
        tokens = torch.zeros(len(captions), self.context_length, dtype=torch.int64)
        for i, caption in enumerate(captions):
            ids = self._bpe.encode(caption)
            self.truncated += len(ids) > self.context_length - 2
            row = [self._bpe.sot_token_id, *ids[: self.context_length - 2], self.eos_id]
            tokens[i, : len(row)] = torch.tensor(row)
        return tokens


AnyTokenizer = Tokenizer | OpenClipTokenizer | HuggingFaceTokenizer


def open_clip_tokenizer(name: str, *, context_length: int) -> OpenClipTokenizer | HuggingFaceTokenizer:
    """The tokenizer of a model that is built into the installed open_clip: CLIP's own or a Hugging Face one.

    Args:
        name: "open_clip:MODEL".
        context_length: tokens per caption.

    Raises:
        ValueError: there is no such model, or its tokenizer cannot be had.
    """
    text_cfg = _built_in(name).get("text_cfg", {})
    if other := text_cfg.get("hf_tokenizer_name"):
        return HuggingFaceTokenizer(other, context_length, text_cfg)
    return OpenClipTokenizer(name, context_length)


def _built_in(name: str) -> dict[str, Any]:
    """The config of a model of the installed open_clip's own; ValueError for any other name."""
    model = name.removeprefix(PREFIX).replace("/", "-")  # open_clip takes ViT-B/32 too
    configs = open_clip_folder() / "model_configs"
    if model not in {path.stem for path in configs.glob("*.json")}:
        raise ValueError(
            f"--tokenizer {name}: not a model that open_clip has built in, such as open_clip:ViT-B-32; for a folder "
            "give its path"
        )
    return json.loads((configs / f"{model}.json").read_text(encoding="utf-8"))
