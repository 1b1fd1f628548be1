"""open_clip's own models with the forward that the trainer calls: uint8 images and token ids in, unit vectors out.

This module is imported only for runs with such a model, because open_clip is an optional dependency. Parameters and
buffers keep open_clip's names. logit_scale and logit_bias are [1], which DeepSpeed needs and open_clip supports.

Shapes: m rows of a micro-batch, S pixels per side, L tokens, D embed_dim.
"""

import math
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F

from infcl.models.open_clip_config import OpenClipConfig
from infcl.models.preprocess import normalize_pixels

try:
    import open_clip
except (ImportError, RuntimeError) as error:  # RuntimeError: builds of torchvision and torch differ
    raise ValueError(f"models of open_clip's need open_clip: pip install open_clip_torch ({error})") from error


class _Trained:
    """The trainer's model interface, implemented with the towers that open_clip builds."""

    cfg: OpenClipConfig
    frozen: dict[str, bool]  # the full tower
    keeps_trunk: dict[str, bool]

    def forward(self, images: torch.Tensor | None = None, texts: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Encode images, texts or both.

        Args:
            images: [m, 3, S, S], uint8 pixels, or floating and normalised.
            texts: int64 [m, L].

        Returns:
            A dict with the keys that apply:
                logit_scale: [1] f32, in log-space.
                logit_bias: [1] f32, if the model has one.
                image_features, text_features: [m, D] f32 with unit norm.
        """
        model: Any = self
        out = {"logit_scale": model.logit_scale.float() + 0}
        if model.logit_bias is not None:
            out["logit_bias"] = model.logit_bias.float() + 0
        if images is not None:
            if images.dtype == torch.uint8:
                images = normalize_pixels(images, mean=self.cfg.preprocess.mean, std=self.cfg.preprocess.std)
            dtype = next(model.visual.parameters()).dtype
            out["image_features"] = F.normalize(model.encode_image(images.to(dtype)).float(), dim=-1)
        if texts is not None:
            out["text_features"] = F.normalize(model.encode_text(texts).float(), dim=-1)
        return out

    def lock_image_tower(self, unlocked_groups: int = 0, *, keep_trunk: bool = True) -> None:
        """Freeze the image tower except its last groups, as open_clip defines them.

        Call this before deepspeed.initialize.
        """
        model: Any = super()
        module: Any = self
        counts = {name: value for name, value in module.named_buffers() if name.endswith("num_batches_tracked")}
        model.lock_image_tower(unlocked_groups, freeze_bn_stats=True)
        for name in counts.keys() - dict(module.named_buffers()).keys():  # frozen norms lack them, exports have them
            module.get_submodule(name.rpartition(".")[0]).register_buffer("num_batches_tracked", counts[name])
        self.frozen["image"] = unlocked_groups == 0

    def lock_text_tower(self, unlocked_layers: int = 0, *, keep_trunk: bool = True) -> None:
        """Freeze the text tower except its last layers."""
        model: Any = super()
        model.lock_text_tower(unlocked_layers)
        self.frozen["text"] = unlocked_layers == 0

    def trunk_numbers(self) -> int:
        """Return 0: a locked tower keeps nothing between the two passes of a step and is encoded again."""
        return 0


class OpenClip(_Trained, open_clip.CLIP):
    """open_clip.CLIP, which has the text tower's parameters at the top level."""


class OpenClipCustomText(_Trained, open_clip.CustomTextCLIP):
    """open_clip.CustomTextCLIP, which has the text tower in `text`."""


def build_open_clip(
    cfg: OpenClipConfig,
    *,
    init_logit_scale: float = math.log(1 / 0.07),
    init_logit_bias: float | None = None,
    activation_checkpointing: bool = False,
) -> OpenClip | OpenClipCustomText:
    """Build a model with random weights, as open_clip's create_model does.

    Args:
        cfg: the model's config.
        init_logit_scale: initial logit_scale, in log-space.
        init_logit_bias: initial logit_bias, or None for a model without one.
        activation_checkpointing: recompute the blocks' activations in the backward pass.

    Raises:
        ValueError: open_clip, timm or transformers cannot build the model (the message includes theirs), or the text
            tower and its tokenizer have different padding ids.
    """
    fields = deepcopy(cfg.fields)
    custom_text = fields.pop("custom_text", False) or "hf_model_name" in fields["text_cfg"]
    fields |= {"init_logit_scale": init_logit_scale, "init_logit_bias": init_logit_bias, "nonscalar_logit_scale": True}
    if "timm_model_name" in fields["vision_cfg"]:
        fields["vision_cfg"]["timm_model_pretrained"] = False
    if "hf_model_name" in fields["text_cfg"]:
        fields["text_cfg"]["hf_model_pretrained"] = False
        _check_without_code(fields["text_cfg"]["hf_model_name"], cfg.source)
    try:
        model = (OpenClipCustomText if custom_text else OpenClip)(**fields)
        if "timm_model_name" in fields["vision_cfg"]:
            _set_image_size(model.visual, cfg.vision_cfg.image_size)
    except Exception as error:  # three libraries raise their own types
        raise ValueError(f"--model {cfg.source} cannot be built: {type(error).__name__}: {error}") from error
    if padding := _other_padding(model, fields["text_cfg"]):
        raise ValueError(f"--model {cfg.source}: {padding}: use the tokenizer that belongs to the text tower")
    if activation_checkpointing:
        model.set_grad_checkpointing(True)
    model.cfg = cfg
    model.frozen = {"image": False, "text": False}
    model.keeps_trunk = {"image": False, "text": False}
    return model


def _other_padding(model: Any, text_cfg: dict[str, Any]) -> str:
    """Return how the tokenizer's padding differs from what a Hugging Face tower masks, or "" if it does not."""
    if "hf_model_name" not in text_cfg or "pad_id" not in text_cfg:
        return ""
    pads, masked = text_cfg["pad_id"], model.text.config.pad_token_id
    return "" if pads == masked else f"the tokenizer pads with {pads}, the text tower masks {masked}"


def _set_image_size(visual: Any, size: int) -> None:
    """Set the image size of a timm model, if it differs from the pretrained one and the model can change it."""
    made_for = visual.trunk.pretrained_cfg["input_size"][-1]
    if size != made_for and hasattr(visual.trunk, "set_input_size"):
        visual.set_input_size(size)


def _check_without_code(name: str, source: str) -> None:
    """Raise a ValueError if a Hugging Face config cannot be loaded, or only by running code that comes with it."""
    try:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"--model {source}: the text tower {name} cannot be had ({str(error).splitlines()[0]}); put a folder with "
            "its config.json into text_cfg.hf_model_name"
        ) from error
