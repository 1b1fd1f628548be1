"""CLIP's own byte-pair tokenizer, from open_clip where it is installed: to fine-tune weights that were trained with it.

`--tokenizer open_clip:<model>`, e.g. open_clip:ViT-B-32. Ids: [start, ..., end, 0, ...], 49,408 of them; the text tower
pools at the largest id, which is the end. Ten times slower than sentencepiece, and still a small part of a decode.
"""

import hashlib
import json
from collections.abc import Sequence

import torch

PREFIX = "open_clip:"
_MAX_CACHE = 200_000  # words; open_clip's own cache grows without end


class OpenClipTokenizer:
    """The interface of tokenizer.Tokenizer over open_clip's. Raises ValueError for models with another tokenizer."""

    def __init__(self, name: str, context_length: int = 77):
        try:
            from open_clip import get_tokenizer
            from open_clip.tokenizer import SimpleTokenizer
        except ModuleNotFoundError as error:
            raise ValueError(f"--tokenizer {name} needs open_clip: pip install open_clip_torch ({error})") from error
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"--tokenizer {name}: open_clip is installed but cannot be imported ({error}); are torch and "
                "torchvision of one build (CPU or CUDA)?"
            ) from error
        model = name.removeprefix(PREFIX)
        self._bpe = get_tokenizer(model, context_length=context_length)
        if type(self._bpe) is not SimpleTokenizer:
            raise ValueError(f"--tokenizer {name}: {model} has a {type(self._bpe).__name__}, not CLIP's own tokenizer")
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
