"""open_clip's own models with the forward that the trainer calls: uint8 images and token ids in, unit vectors out.

`clip.build_towers` imports this module only for such a model, because open_clip is an optional package. Parameters and
buffers keep open_clip's names. logit_scale and logit_bias are [1], which DeepSpeed needs and open_clip supports.

Shapes: m rows of a micro-batch, S pixels per side, L tokens, D embed_dim.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from infcl.models.open_clip_config import OpenClipConfig, hugging_face_config
from infcl.models.preprocess import normalize_pixels


class _Trained:
    """The trainer's model interface, implemented with the towers that open_clip builds."""

    cfg: OpenClipConfig
    frozen: dict[str, bool]  # the full tower

    def forward(self, images: torch.Tensor | None = None, texts: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Encode images, texts or both, as CLIP.forward does; texts are padded, int64 [m, L]."""
        model: Any = self
        out = {"logit_scale": model.logit_scale.float() + 0}
        if model.logit_bias is not None:
            out["logit_bias"] = model.logit_bias.float() + 0
        if images is not None:
            if images.dtype == torch.uint8:
                images = normalize_pixels(images, self.cfg.preprocess)
            dtype = next(model.visual.parameters()).dtype
            out["image_features"] = F.normalize(model.encode_image(images.to(dtype)).float(), dim=-1)
        if texts is not None:
            out["text_features"] = F.normalize(model.encode_text(texts).float(), dim=-1)
        return out

    @property
    def transformers(self) -> dict[str, Any]:
        """No tower: their blocks differ."""
        return {}

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the image tower except its last groups, as open_clip defines them.

        Call this before deepspeed.initialize.
        """
        model: Any = super()
        module: Any = self
        counts = {name: value for name, value in module.named_buffers() if name.endswith("num_batches_tracked")}
        with self._locking("image tower", unlocked_groups):
            model.lock_image_tower(unlocked_groups, freeze_bn_stats=True)
        for name in counts.keys() - dict(module.named_buffers()).keys():  # frozen norms lack them, exports have them
            module.get_submodule(name.rpartition(".")[0]).register_buffer("num_batches_tracked", counts[name])
        self.frozen["image"] = unlocked_groups == 0

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the text tower except its last layers."""
        model: Any = super()
        with self._locking("text tower", unlocked_layers):
            model.lock_text_tower(unlocked_layers)
        self.frozen["text"] = unlocked_layers == 0

    @contextmanager
    def _locking(self, part: str, unlocked: int) -> Iterator[None]:
        """Raise ValueError if open_clip cannot lock a tower except `unlocked` groups, or if nothing is locked."""
        model: Any = self
        trainable = sum(parameter.requires_grad for parameter in model.parameters())
        where = f"--model {self.cfg.source}: {part} with {unlocked} unlocked groups"
        try:
            yield
        except Exception as error:  # open_clip, timm and transformers raise their own types
            raise ValueError(f"{where} cannot be locked: {type(error).__name__}: {error}") from error
        if trainable == sum(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"{where} has nothing left to lock: unlock fewer, or train all of it without the lock")


class OpenClip(_Trained, open_clip.CLIP):
    """open_clip.CLIP, which has the text tower's parameters at the top level."""


class OpenClipCustomText(_Trained, open_clip.CustomTextCLIP):
    """open_clip.CustomTextCLIP, which has the text tower in `text`."""


def build_open_clip(
    cfg: OpenClipConfig,
    *,
    init_logit_scale: float = math.log(1 / 0.07),
    activation_checkpointing: bool = False,
) -> OpenClip | OpenClipCustomText:
    """Build a model with random weights, as open_clip's create_model does.

    Args:
        cfg: the model's config.
        init_logit_scale: initial logit_scale, in log-space.
        activation_checkpointing: recompute the blocks' activations in the backward pass.

    Raises:
        ValueError: open_clip, timm or transformers cannot build the model, or
            the text tower and its tokenizer have different padding ids.
    """
    fields = deepcopy(cfg.fields)
    custom_text = fields.pop("custom_text", False) or "hf_model_name" in fields["text_cfg"]
    fields |= {"init_logit_scale": init_logit_scale, "nonscalar_logit_scale": True}
    if "timm_model_name" in fields["vision_cfg"]:
        fields["vision_cfg"]["timm_model_pretrained"] = False
    if "hf_model_name" in fields["text_cfg"]:
        fields["text_cfg"]["hf_model_pretrained"] = False
        hugging_face_config(fields["text_cfg"]["hf_model_name"], cfg.source)
    try:
        model = (OpenClipCustomText if custom_text else OpenClip)(**fields)
        if "timm_model_name" in fields["vision_cfg"]:
            _set_image_size(model.visual, cfg.vision_cfg.image_size)
    except Exception as error:  # three libraries raise their own types
        raise ValueError(f"--model {cfg.source} cannot be built: {type(error).__name__}: {error}") from error
    if activation_checkpointing:
        model.set_grad_checkpointing(True)
    model.cfg = cfg
    _check_towers(model)
    _check_padding(model, fields["text_cfg"])
    model.frozen = {"image": False, "text": False}
    return model


@torch.no_grad()
def _check_towers(model: Any) -> None:
    """Check that both towers of a new model encode the inputs of its config to [m, embed_dim].

    Only shapes are computed. A tower that reads values of its input (NLLB) is not checked.

    Raises:
        ValueError: a tower fails, or gives anything else. The message has the model and the tower.
    """
    cfg: OpenClipConfig = model.cfg
    side, length = cfg.vision_cfg.image_size, cfg.text_cfg.context_length
    device = model.logit_scale.device
    model.eval()  # counters of BatchNorm move even without memory
    for part, encode, shape, dtype, fix in (
        ("image tower", model.encode_image, (2, 3, side, side), torch.float32, "vision_cfg and --force-image-size"),
        ("text tower", model.encode_text, (2, length), torch.int64, "text_cfg and --force-context-length"),
    ):
        where = f"--model {cfg.source}: {part}"
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                found = encode(torch.zeros(shape, dtype=dtype, device=device))
        except (DataDependentOutputException, DynamicOutputShapeException):
            continue
        except Exception as error:  # open_clip, timm and transformers raise their own types
            raise ValueError(
                f"{where} cannot encode {list(shape)}: {type(error).__name__}: {error}; check {fix}"
            ) from error
        what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if what != [2, cfg.embed_dim]:
            raise ValueError(
                f"{where} gives {what} for {list(shape)}; the loss needs {[2, cfg.embed_dim]}: "
                "embed_dim must be the width of both towers' features"
            )
    model.train()


def _check_padding(model: Any, text_cfg: dict[str, Any]) -> None:
    """Raise ValueError if the tokenizer pads with another id than the one that a Hugging Face tower masks."""
    if "hf_model_name" not in text_cfg or "pad_id" not in text_cfg:
        return
    pads, masked = text_cfg["pad_id"], model.text.config.pad_token_id
    if pads != masked:
        raise ValueError(
            f"--model {model.cfg.source}: tokenizer pads with {pads}, text tower {text_cfg['hf_model_name']} masks "
            f"{masked}: use the tokenizer that belongs to the text tower"
        )


def _set_image_size(visual: Any, size: int) -> None:
    """Set the image size of a timm model, if it differs from the pretrained one and the model can change it."""
    made_for = visual.trunk.pretrained_cfg["input_size"][-1]
    if size != made_for and hasattr(visual.trunk, "set_input_size"):
        visual.set_input_size(size)
