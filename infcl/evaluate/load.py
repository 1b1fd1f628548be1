"""Load a model and its tokenizer for evaluation, without a trainer or DeepSpeed.

In:  a run, a checkpoint, an export, an open_clip or CLIPModel folder, or a weights file and the name of its config.
Out: CLIP in eval mode on the device, and a callable that turns texts into token ids.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from infcl.convert.import_weights import model_with, other_resizing, read_weights, sentencepiece_file
from infcl.data.tokenizer import Tokenizer, ids_of
from infcl.data.tokenizer.open_clip import HF_PREFIX, PREFIX, HuggingFaceTokenizer, open_clip_tokenizer
from infcl.models import CLIP, CLIPConfig, OpenClipConfig, load_any_config

log = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], torch.Tensor]


def load_model(
    checkpoint: str | Path,
    *,
    device: torch.device,
    model: str | None = None,
    tokenizer: str | Path | None = None,
    ema: bool = False,
) -> tuple[CLIP, Tokenize]:
    """Load a model in eval mode on the device, and its tokenizer.

    Args:
        checkpoint: run, checkpoint, export, open_clip or CLIPModel folder, or a weights file.
        model: config of a bare weights file.
        tokenizer: see `load_tokenizer`; by default the one stored with the weights.
        ema: load a run's averaged weights.

    Returns:
        The model, and the tokenizer: n texts -> int64 [n, L].

    Raises:
        ValueError: weights, config and tokenizer do not match.
    """
    weights = read_weights(checkpoint, ema=ema)
    cfg = weights.cfg
    if cfg is None:
        if model is None:
            raise ValueError(f"{checkpoint} is a bare file: give its config, --model ViT-B-32 or a JSON file")
        cfg = load_any_config(model)
    elif model is not None:
        raise ValueError(f"--model {model}: {checkpoint} brings its own config; leave --model out")
    tokenize = load_tokenizer(tokenizer or _folder_of_tokenizer(Path(checkpoint)), cfg)
    if weights.cfg is None and isinstance(tokenize, Tokenizer):  # the config has CLIP's own vocabulary size
        cfg = cfg.with_tokenizer(**ids_of(tokenize))
        tokenize.repairs = True
    clip = model_with(weights, cfg)
    if isinstance(cfg, CLIPConfig) and (resizing := other_resizing(Path(checkpoint))):
        log.warning(
            "%s was trained with images resized by %s; infcl resizes the short side (bicubic) and crops the center, so "
            "its published figures are not reproduced exactly",
            checkpoint,
            resizing,
        )
    return clip.to(device).eval(), tokenize


def load_tokenizer(source: str | Path | None, cfg: CLIPConfig | OpenClipConfig) -> Tokenize:
    """Load a tokenizer for a model.

    Args:
        source: a sentencepiece .model, a folder with one or with Hugging Face's tokenizer files, "open_clip:MODEL" or
            "hf:NAME_OR_FOLDER". None: the tokenizer that open_clip's config names, or CLIP's own BPE for 49,408 ids.
        cfg: the model's config.

    Raises:
        ValueError: the tokenizer does not exist, or has more ids than the model has embeddings.
    """
    text, fields = cfg.text_cfg, cfg.to_dict()["text_cfg"]
    if source is None and isinstance(cfg, OpenClipConfig) and fields.get("hf_tokenizer_name"):
        source = f"{HF_PREFIX}{fields['hf_tokenizer_name']}"
    elif source is None and text.vocab_size == 49408:
        source = f"{PREFIX}ViT-B-32"
    elif source is None:
        raise ValueError(
            f"no tokenizer is stored with the weights, and {text.vocab_size} ids are not CLIP's own: give --tokenizer"
        )
    if str(source).startswith(HF_PREFIX):
        return HuggingFaceTokenizer(str(source), text.context_length, fields)
    if str(source).startswith(PREFIX):
        return open_clip_tokenizer(str(source), context_length=text.context_length)
    path = Path(source)
    if path.is_dir():
        if (found := sentencepiece_file(path)) is None:
            return _hugging_face(path, text.context_length)
        path = found
    if not path.is_file():
        raise ValueError(f"--tokenizer {path}: no such file or folder")
    tokenizer = Tokenizer(path, context_length=text.context_length, repairs=text.repairs_captions)
    if tokenizer.vocab_size > text.vocab_size:
        raise ValueError(f"{path} has {tokenizer.vocab_size} ids, the model {text.vocab_size} embeddings")
    return tokenizer


def _hugging_face(folder: Path, context_length: int) -> Tokenize:
    """Return the tokenizer of a CLIPModel folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # the default, None, would prompt
    except ValueError as error:
        why = str(error).split(" which must be executed")[0]  # drop transformers' advice to run the code
        raise ValueError(f"{folder}: its tokenizer cannot be opened without running code from it: {why}") from error
    options = {"padding": "max_length", "truncation": True, "max_length": context_length, "return_tensors": "pt"}
    return lambda texts: tokenizer(texts, **options).input_ids


def _folder_of_tokenizer(checkpoint: Path) -> Path | None:
    """Return the folder of a run, checkpoint or export that has tokenizer files, or None."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for place in (folder, folder.parent.parent):
        if sentencepiece_file(place) or any((place / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            return place
    return None
