"""A trainer that encodes only a few micro-batches per step, to measure the memory of a very large batch.

Everything that grows with the batch has its full size: cached pixels, tokens, features, the loss of all samples over
all ranks, feature gradients. Micro-batches between the first and the last `real` ones of a pass get random unit vectors
as features and no backward. Encoding them would take hours, and no more memory than the others.
"""

import dataclasses
import gc
from typing import Any

import torch
import torch.nn.functional as F

from infcl.engine.optim import later_host_bytes
from infcl.models.packing import num_texts
from infcl.step.pixels import build_pixel_cache
from infcl.train.build import build_loader, build_loss
from infcl.train.diagnostics import SampledLoss
from infcl.train.metrics import PhaseTimer
from infcl.train.observers import Step
from infcl.train.trainer import Trainer


class AbridgedTrainer(Trainer):
    """A trainer whose engine runs different batches one after another, because its start takes longer than a step."""

    real = 2  # number of micro-batches at each end of a pass that are encoded
    replaying = False  # whether a backward of the step has begun; before it, no lasting state has changed

    def fit(self) -> dict:
        raise RuntimeError("a trainer of changing batches learns nothing: it measures")

    def release(self) -> None:
        """Free all state of a batch and reset the peak memory. Parameters, gradients and moments stay."""
        for name in ("pixels", "loss", "sampled_loss"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def take(self, *, steps: int = 1, **changes) -> None:
        """Change the batch, the loss or the pixel cache (fields of the config) for the next `steps` steps."""
        self.inputs = dataclasses.replace(self.inputs, spec=self.spec.change(**changes))
        self.spec, self.config, self.batch = self.inputs.spec, self.inputs.spec.flags, self.inputs.spec.batch
        before: Any = self.loader
        loader: Any = build_loader(self.inputs, self.parallel)
        loader._source.pool = before._source.pool  # reuse the random images: drawing and pinning takes a second
        self.loader = loader
        self.pixels = build_pixel_cache(
            self.spec,
            self.engine.module,
            self.parallel,
            resident=self.resident,
            repeats=self.loader.repeats,
            reserved=later_host_bytes(self.spec, self.engine.module),
        )
        self.loss = build_loss(self.spec, self.parallel)
        self.sampled_loss = SampledLoss(self.loss, rows=self.batch.micro_batch_size)
        self.timer = PhaseTimer(self.parallel.device)
        self.step, self.total_steps = 0, steps

    def train_step(self, micro_batches) -> Step:
        self.encoded, self.replaying = 0, False
        return super().train_step(micro_batches)

    def _backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        self.replaying = True
        if surrogate.requires_grad:
            super()._backward(surrogate, is_last)

    def _encode(self, micro_batch: dict) -> dict:
        index, self.encoded = self.encoded, self.encoded + 1
        return super()._encode(micro_batch) if self._is_real(index) else self._stand_in(micro_batch)

    def _encode_again(self, micro_batch: dict, kept: dict, first: int) -> dict:
        if self._is_real(first // self.batch.micro_batch_size):
            return super()._encode_again(micro_batch, kept, first)
        return self._stand_in(micro_batch)

    def _is_real(self, index: int) -> bool:
        """Return whether a micro-batch is encoded.

        The last ones keep their graphs (cached activations). The last one before them is replayed and ends the step.
        """
        cached = self.batch.num_micro_batches - max(1, self.resident)
        return index < self.real or index >= cached - self.real

    def _stand_in(self, micro_batch: dict) -> dict[str, torch.Tensor]:
        device, shape = self.parallel.device, (num_texts(micro_batch), self.model_config.embed_dim)
        features = {
            name: F.normalize(torch.randn(shape, device=device), dim=1) for name in ("image_features", "text_features")
        }
        scalars = {"logit_scale": 2.659, "logit_bias": self.model_config.init_logit_bias}
        return features | {
            n: torch.full([1], value, device=device) for n, value in scalars.items() if value is not None
        }
