"""CLIP: two towers and a scale. Images and texts in, unit vectors out.

The state dict has open_clip's names and loads its checkpoints. One shape differs: logit_scale and logit_bias are [1]
here, because DeepSpeed cannot view a 0-dim parameter as bytes, and 0-dim in open_clip. Loading accepts both shapes;
infcl.convert.export writes 0-dim.

Shapes: m rows of a micro-batch, S pixels per side, L tokens, D embed_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from infcl.config import TrainConfig
from infcl.models.config import CLIPConfig, ModelConfig
from infcl.models.open_clip_config import import_open_clip
from infcl.models.text import TextTower
from infcl.models.transformer import Transformer
from infcl.models.vision import VisionTransformer


def build_towers(cfg: ModelConfig, **options: Any) -> Any:
    """Build a model with random weights.

    Args:
        cfg: config of our own towers, or of a model that open_clip builds.
        options: init_logit_scale, activation_checkpointing; see CLIP.

    Returns:
        A CLIP or a model of open_clip_model.py. Both have the same interface: CLIP's forward, its locks and `cfg`.

    Raises:
        ValueError: open_clip is needed, but it cannot be imported or cannot build the model.
    """
    if isinstance(cfg, CLIPConfig):
        return CLIP(cfg, **options)
    import_open_clip(f"--model {cfg.source}")
    from infcl.models.open_clip_model import build_open_clip

    return build_open_clip(cfg, **options)


def lock_towers(model: Any, flags: TrainConfig) -> None:
    """Freeze what --lock-image and --lock-text name. Call this before deepspeed.initialize."""
    if flags.lock_image:
        model.lock_image_tower(flags.lock_image_unlocked_groups)
    if flags.lock_text:
        model.lock_text_tower(flags.lock_text_unlocked_layers)


class CLIP(TextTower):
    """Image tower, text tower and logit scale.

    Args:
        cfg: the model's config. `self.cfg` is the config with the override below.
        init_logit_scale: initial logit_scale, in log-space.
        patch_dropout: overrides the config's; None keeps it.
        activation_checkpointing: recompute the blocks' activations in the backward pass.
    """

    def __init__(
        self,
        cfg: CLIPConfig,
        *,
        init_logit_scale: float = math.log(1 / 0.07),
        patch_dropout: float | None = None,
        activation_checkpointing: bool = False,
    ):
        cfg = cfg.with_overrides(patch_dropout=patch_dropout)
        super().__init__(cfg.text_cfg, cfg.embed_dim, quick_gelu=cfg.quick_gelu)
        self.cfg = cfg
        self.visual = VisionTransformer(
            cfg.vision_cfg, cfg.embed_dim, quick_gelu=cfg.quick_gelu, preprocess=cfg.preprocess
        )
        for tower in self.transformers.values():
            tower.activation_checkpointing = activation_checkpointing
        self.logit_scale = nn.Parameter(torch.full([1], init_logit_scale))
        self.logit_bias = None if cfg.init_logit_bias is None else nn.Parameter(torch.full([1], cfg.init_logit_bias))
        self.frozen = {"image": False, "text": False}  # the full tower
        self.graphs: dict[str, Callable[..., torch.Tensor]] = {}  # by tower: its forward by CUDA graphs, if it has them
        self._image_in_eval = False
        self.register_load_state_dict_pre_hook(_reshape_scalars)

    def forward(
        self,
        images: torch.Tensor | None = None,
        texts: torch.Tensor | None = None,
        *,
        text_ends: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Encode images, texts or both.

        Args:
            images: [m, 3, S, S], uint8 pixels, or floating and normalised.
            texts: int64 [m, L], or packed rows [r, R] (models/packing.py).
            text_ends: int64 [m], with packed rows.

        Returns:
            A dict with the keys that apply:
                image_features, text_features: [m, D] f32 with unit norm.
                logit_scale: [1] f32, in log-space. The loss takes it from here and never from the module: under ZeRO-3
                    the parameter exists inside forward only.
                logit_bias: [1] f32, if the model has one.
        """
        out = {"logit_scale": self.logit_scale.float() + 0}
        if self.logit_bias is not None:
            out["logit_bias"] = self.logit_bias.float() + 0
        if images is not None:
            encode_image = self.graphs.get("image", self.visual)
            out["image_features"] = F.normalize(encode_image(images).float(), dim=-1)
        if texts is not None:
            encode_text = self.graphs.get("text", self.encode_text)
            out["text_features"] = F.normalize(encode_text(texts, text_ends).float(), dim=-1)
        return out

    @property
    def transformers(self) -> dict[str, Transformer]:
        """The stacks of blocks that both towers share, by tower."""
        return {"image": self.visual.transformer, "text": self.transformer}

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower except its last groups (LiT, arXiv 2111.07991).

        Groups from the end: proj | last block and ln_post | each block before | embeddings. While the embeddings are
        frozen, the tower stays in eval mode, so it applies no patch dropout.

        Args:
            unlocked_groups: how many groups stay trainable.
        """
        visual = self.visual
        stem = [visual.conv1, visual.class_embedding, visual.positional_embedding, visual.ln_pre]
        blocks = visual.transformer
        self._lock("image", stem, blocks, visual.ln_post, visual.proj, unlocked_groups)
        self._image_in_eval = unlocked_groups < len(blocks.resblocks) + 2  # the embeddings are frozen
        self.train(self.training)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the text tower except its last groups.

        Groups from the end: text_projection | last block and ln_final | each block before | embeddings.

        Args:
            unlocked_layers: how many groups stay trainable.
        """
        stem = [self.token_embedding, self.positional_embedding]
        self._lock("text", stem, self.transformer, self.ln_final, self.text_projection, unlocked_layers)

    def _lock(
        self, tower: str, stem: list[Any], blocks: Transformer, norm: nn.Module, projection: nn.Parameter, unlocked: int
    ) -> None:
        """Freeze a tower except its last groups."""
        *first, last = blocks.resblocks
        groups: list[list[Any]] = [stem, *([block] for block in first), [last, norm], [projection]]
        if not 0 <= unlocked <= len(groups):
            raise ValueError(
                f"{unlocked} unlocked groups: this tower has {len(groups)}, embeddings, each block and projection "
                "(--lock-image-unlocked-groups, --lock-text-unlocked-layers)"
            )
        for i, group in enumerate(groups):
            for member in group:
                member.requires_grad_(i >= len(groups) - unlocked)
        blocks.first_trained = frozen_blocks(len(blocks.resblocks), unlocked)
        self.frozen[tower] = unlocked == 0

    def train(self, mode: bool = True) -> "CLIP":
        super().train(mode)
        if self._image_in_eval:
            self.visual.eval()
        return self


def frozen_blocks(blocks: int, unlocked: int) -> int:
    """Return how many leading blocks of a locked tower are frozen."""
    return max(0, min(blocks, blocks + 1 - unlocked))


def _reshape_scalars(module: CLIP, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
    for name in ("logit_scale", "logit_bias"):
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].reshape(1)
