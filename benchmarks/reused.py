"""A trainer whose one engine takes batch after batch, or loss after loss: starting takes longer than measuring."""

import dataclasses
import gc
from typing import Any

import torch

from infcl.engine.optim import later_host_bytes
from infcl.step.pixels import build_pixel_cache
from infcl.train.build import build_loader, build_loss
from infcl.train.diagnostics import SampledLoss
from infcl.train.metrics import PhaseTimer
from infcl.train.observers import Step
from infcl.train.trainer import Trainer


class ReusedTrainer(Trainer):
    replaying = False  # whether a backward of the step has begun: what came before has changed nothing that stays

    def fit(self) -> dict:
        raise RuntimeError("a trainer of changing batches learns nothing: it measures")

    def release(self) -> None:
        """Free all that belongs to a batch, the peak begins anew; parameters, their gradients and moments stay."""
        for name in ("pixels", "loss", "sampled_loss"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def take(self, *, steps: int = 1, **changes) -> None:
        """For the next `steps` steps another batch, loss or place of the pixels: fields of the config."""
        self.inputs = dataclasses.replace(self.inputs, spec=self.spec.change(**changes))
        self.spec, self.config, self.batch = self.inputs.spec, self.inputs.spec.flags, self.inputs.spec.batch
        before: Any = self.loader
        loader: Any = build_loader(self.inputs, self.parallel)
        loader._source.pool = before._source.pool  # the same random images: drawing and pinning takes a second
        self.loader = loader
        self.pixels = build_pixel_cache(
            self.spec,
            self.engine.module,
            self.parallel,
            resident=self.resident,
            repeats=self.loader.repeats,
            reserved=later_host_bytes(self.spec, self.engine.module),
        )
        self.take_loss(build_loss(self.spec, self.parallel))
        self.timer = PhaseTimer(self.parallel.device)
        self.step, self.total_steps = 0, steps

    def take_loss(self, loss) -> None:
        """Any `loss(images [b, D] f32, texts [b, D] f32, scale [1] f32, bias [1] or None)` -> [] from here on."""
        self.loss = loss
        self.sampled_loss = SampledLoss(loss, rows=self.batch.micro_batch_size)

    def train_step(self, micro_batches) -> Step:
        self.replaying = False
        return super().train_step(micro_batches)

    def _backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        self.replaying = True
        super()._backward(surrogate, is_last)
