"""The teacher of a run (--distill-model, --teacher-key): the embeddings of each sample that the loss compares with.

In:  a micro-batch's pixels on the device, and from the loader the teacher's tokens of its captions, or its embeddings.
Out: image and text embeddings, f32 [m, E] of unit norm.

A teacher model is separate from the engine: it is frozen, in eval mode and in FP32 on every rank, computes in the
precision of the towers, and is no part of the optimizer, the checkpoints or the average. It sees the augmented pixels
of the student, and each sample once per step. Tensor-parallel ranks divide the samples.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from infcl.config import RunSpec, TrainConfig
from infcl.data.tokenizer.open_clip import AnyTokenizer
from infcl.evaluate.load import load_model
from infcl.models.config import ModelConfig
from infcl.parallel import Parallel, join_parts

_STORED_SCALE = 100.0  # of CLIP's own models


class TeacherModel(NamedTuple):
    """A frozen model and its tokenizer."""

    model: Any
    tokenizer: AnyTokenizer


def load_teacher(flags: TrainConfig, model_config: ModelConfig) -> TeacherModel | None:
    """Load the model of --distill-model on the CPU; None without the flag.

    Raises:
        ValueError: it has no such weights, or takes images of another size than the student.
    """
    name, weights = flags.distill_model, flags.distill_pretrained
    if name is None:
        return None
    try:
        model, tokenizer, _ = load_model(weights or name, device=torch.device("cpu"), model=name if weights else None)
    except ValueError as error:
        raise ValueError(f"--distill-model {name}: {error}") from error
    theirs, own = model.cfg.vision_cfg.image_size, model_config.vision_cfg.image_size
    if theirs != own:
        raise ValueError(
            f"--distill-model {name} takes images of {theirs} pixels, --model {flags.model} of {own}: both see the "
            f"same pixels, so choose another teacher, or --force-image-size {theirs}"
        )
    return TeacherModel(model.requires_grad_(False), tokenizer)


class Teacher:
    """The embeddings of a run's teacher on this rank; a TeacherModel moves to the device.

    Attributes:
        scale: factor of the teacher's cosines.
    """

    def __init__(self, spec: RunSpec, parallel: Parallel, loaded: TeacherModel | None):
        self.precision, self.parallel, self.scale = spec.precision, parallel, spec.flags.teacher_scale or _STORED_SCALE
        self.model = None if loaded is None else loaded.model.to(parallel.device)
        if self.model is not None and spec.flags.teacher_scale is None:
            self.scale = math.exp(float(self.model.logit_scale))

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return image and text embeddings, f32 [m, E], of a micro-batch of m samples.

        Args:
            images: this tensor-parallel rank's part of the pixels, on the device.
            batch: the same part from the loader (samples.SampleDecoder).
        """
        device = self.parallel.device
        if self.model is None:
            sides = F.normalize(batch["teacher"].to(device, non_blocking=True).float(), dim=-1).unbind(1)
        else:
            with torch.autocast(device.type, self.precision.matmul_dtype, enabled=self.precision.half_matmuls):
                out = self.model(images, batch["teacher_texts"].to(device, non_blocking=True))
            sides = out["image_features"], out["text_features"]
        return tuple(join_parts(self.parallel, side) for side in sides)
