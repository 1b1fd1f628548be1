"""Load a model and its tokenizer for evaluation, without a trainer or DeepSpeed.

In:  a run, a checkpoint, an export, an open_clip or CLIPModel folder, or a weights file and the name of its config.
Out: CLIP in eval mode on the device, and a callable that turns texts into token ids.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from infcl.convert.import_weights import config_of, model_with, read_weights
from infcl.data.tokenizer import ids_of
from infcl.data.tokenizer.open_clip import AnyTokenizer
from infcl.data.tokenizer.source import find_tokenizer, stored_tokenizer
from infcl.models import CLIP
from infcl.models.open_clip_config import PREFIX

Tokenize = Callable[[list[str]], torch.Tensor]


class Loaded(NamedTuple):
    """A model in eval mode, and what reads its texts."""

    model: CLIP
    tokenizer: AnyTokenizer  # n texts -> int64 [n, L]
    averaged: bool | None  # whether the weights are a run's averages; None if they are of no run


def load_model(
    checkpoint: str | Path,
    *,
    device: torch.device,
    model: str | None = None,
    tokenizer: str | Path | None = None,
    ema: bool | None = None,
) -> Loaded:
    """Load a model in eval mode on the device, and its tokenizer.

    Args:
        checkpoint: run, checkpoint, export, open_clip or CLIPModel folder, a weights file, or open_clip:TAG.
        model: config of a bare weights file or a tag.
        tokenizer: see `find_tokenizer`; by default the one that is recorded with the weights.
        ema: the averaged weights of a run or checkpoint; by default if it has them.

    Raises:
        ValueError: weights, config and tokenizer do not match.
    """
    weights = read_weights(checkpoint, model=model, ema=ema)
    if model is not None and str(checkpoint).startswith(PREFIX):
        tokenizer = tokenizer or PREFIX + model.removeprefix(PREFIX)
    cfg = config_of(weights, checkpoint, model)
    source = find_tokenizer(tokenizer, cfg) if tokenizer else stored_tokenizer(Path(checkpoint), cfg)
    ids = cfg.text_cfg.vocab_size
    if source is None:
        raise ValueError(f"no tokenizer is stored with the weights, and {ids} ids are not CLIP's own: give --tokenizer")
    tokenize = source.open(cfg.text_cfg.context_length)
    if cfg is not weights.cfg and source.kind == "sentencepiece":  # the config has CLIP's own vocabulary size
        cfg = cfg.with_tokenizer(**ids_of(tokenize))
    elif source.kind == "sentencepiece" and tokenize.vocab_size > ids:
        raise ValueError(f"{source.where} has {tokenize.vocab_size} ids, the model {ids} embeddings")
    if cfg.text_cfg.pool_type == "eos" and source.kind == "hf":
        ends = tokenize(["a", ""]) == cfg.text_cfg.eos_id
        if not ends.any(1).all() or ends[0, 0]:
            raise ValueError(
                f"{source.where}: the model pools at id {cfg.text_cfg.eos_id}, with which it does not end a caption"
            )
    return Loaded(model_with(weights, cfg).to(device).eval(), tokenize, weights.averaged)
