"""The DeepSpeed engine: forward, backward, step and clamp. config/preset.py has its config, state.py its sharded state.

These rules make training exact under ZeRO 0-3 (docs/concepts/engine.md has the reasons):

* gradient_accumulation_steps = M; the boundary is set by hand before the last backward; `step()` runs once per
  optimizer step;
* every forward goes through the engine, with both towers, and has exactly one backward;
* backward runs with `scale_wrt_gas=False`: the loss follows the gradient scaling convention (the mean of the ranks'
  gradients is the exact gradient), DeepSpeed averages over ranks, and no other factor applies;
* the config always sets gradient_clipping (DeepSpeed's default clips at 1.0);
* with BF16 or FP16 parameters, micro-batch gradients accumulate in FP32, the loss reads logit_scale from its FP32
  master weight, and the ZeRO stage is at least 1.

Tested with DeepSpeed 0.19.8.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infcl.config import RunSpec
from infcl.config.preset import deepspeed_config
from infcl.engine.parameter_groups import build_optimizer, tower
from infcl.engine.patches import (
    MEMORY_REPORT,
    release_by_the_present_trace,
    scale_between_steps,
    square_of,
    use_norm,
)
from infcl.engine.state import EMA, ZeroState
from infcl.engine.zero3 import KeptParameters, reduce_in_few_launches
from infcl.models.transformer import ResidualBlock, repeated_blocks
from infcl.parallel import Parallel
from infcl.step.zero import reduce_what_is_left, shards, zero_backward

_RUNNING = (".running_mean", ".running_var")  # buffers of a batch norm
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Engine:
    """A CLIP model in a DeepSpeed engine. Under tensor parallelism, this rank's part of it (build.split_model).

    Attributes:
        state: the sharded FP32 weights, optimizer state and averages.
        kept: parameters that stay gathered between passes (stage 3), else None.
        shown: None while forwards use the weights, EMA while they use the averages.
    """

    def __init__(self, model: nn.Module, spec: RunSpec, parallel: Parallel):
        config = spec.flags
        self.parallel = parallel
        self.precision = spec.precision
        self.zero_stage = spec.zero_stage
        self.offloads_optimizer = "optimizer" in spec.offloads
        self.optimizer_name = config.opt
        self.shown: str | None = None
        deepspeed = _import_deepspeed()
        mpu = None
        if parallel.tp_size > 1:
            from megatron_patches.groups import DeepSpeedMpu

            mpu = DeepSpeedMpu()
        deepspeed.utils.groups.mpu = mpu  # else DeepSpeed would use that of an earlier engine
        exact = _fp32_copy(model) if self.precision.half_parameters and parallel.dp_rank == 0 else {}
        model.to(parallel.device)
        fused = parallel.device.type == "cuda" or self.offloads_optimizer
        optimizer = build_optimizer(model, config, global_batch_size=spec.batch.global_batch_size, fused=fused)
        given = deepspeed_config(spec.preset, spec.precision, spec.batch, config.grad_clip_norm, leaves=_leaves(model))
        try:
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=given, mpu=mpu, dist_init_required=False
            )
        except ValueError as error:  # DeepSpeed checks the preset's values; pydantic's message has four lines
            why = "; ".join(line.strip() for line in str(error).splitlines()[:3])
            raise ValueError(f"--deepspeed_config {config.deepspeed_config}: {why}") from error
        self.kept: KeptParameters | None = None
        if self.zero_stage == 3:
            release_by_the_present_trace(self.engine.optimizer)
            reduce_in_few_launches(self.engine.optimizer)
            self.kept = KeptParameters(self.engine.optimizer, in_host_memory="param" in spec.offloads)
        if parallel.dp_size == 1 and not shards(self.engine.optimizer):
            self.engine.enable_backward_allreduce = False  # it would copy all gradients into a bucket and back
        reduce_what_is_left(self.engine, compare_ranks=False)
        scaler = self._loss_scaler()
        self._settle_loss_scale = (lambda: None) if scaler is None else scale_between_steps(scaler)
        use_norm(self.engine, lambda: self.norms[2] * self.loss_scale(), counts=parallel.tp_rank == 0)
        self.state = ZeroState(self.engine, self.zero_stage)
        if self.precision.half_parameters:  # DeepSpeed creates its FP32 weights from rounded parameters
            self.state.write_first_copy(exact)
        if config.ema_decay is not None:
            self.state.start_average(config.ema_decay)
        self.dp_group = self.engine.seq_data_parallel_group  # ZeRO averages gradients over this group
        self.measured = self._measured_parameters()
        self.running_statistics = [value for name, value in self.state.buffers() if name.endswith(_RUNNING)]
        if self.running_statistics and self.precision.half_parameters:
            raise ValueError(
                f"--precision {spec.precision} would round the running statistics of the model's batch norms at each "
                "step; use amp_bf16 or fp32"
            )

    @property
    def module(self) -> Any:
        """The model: CLIP, or a model with the same forward and attributes."""
        return self.engine.module

    def train(self, mode: bool = True) -> None:
        """Switch to training mode, or with False to evaluation mode. Call it between steps."""
        self.engine.train(mode)
        if self.kept is not None:
            self.kept.keep(mode)

    def encode(
        self, images: torch.Tensor | None = None, texts: torch.Tensor | None = None, **others: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Encode a micro-batch: CLIP.forward with these arguments, through DeepSpeed."""
        return self.engine(images, texts, **others)

    def backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        """Accumulate d surrogate / d parameters. Reduce over ranks at a step's last backward (ZeRO-2/3: at each)."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        zero_backward(self.engine, surrogate)

    def step(self, learning_rate: float) -> bool:
        """Make one optimizer step, unless the norm of the gradients is not finite. Collective.

        A skipped step leaves parameters and optimizer state unchanged. The counters advance, and in FP16 the loss scale
        decreases.

        Args:
            learning_rate: the schedule's learning rate; each group multiplies it by its `lr_scale`.

        Returns:
            Whether the step was made.
        """
        self.norms = self.grad_norms()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        skipped_before = self.engine.skipped_steps
        if self.zero_stage == 0 and not self.norms[2].isfinite():  # the optimizers of the other stages check this
            self.engine.zero_grad()
            self.engine.global_steps += 1
            self.engine.global_samples += self.engine.train_batch_size()
            self.engine.micro_steps += 1
            self.engine.skipped_steps += 1
            return False
        self.engine.step()
        self._settle_loss_scale()
        return self.engine.skipped_steps == skipped_before

    def grad_norms(self) -> torch.Tensor:
        """Return the norms of the averaged gradients, before clipping. Collective; `step` calls it and clips by it.

        The norms are exact in every stage: each rank squares the fragments it owns, and one all-reduce of four numbers
        adds them up. The last number is 0, or NaN if a gradient that only other tensor-parallel ranks count is not
        finite.

        Returns:
            [image tower, text tower, all] f32, on the device, so that the step does not wait for it. The last one is
            inf if a gradient is not finite. `step` keeps them in `norms`.
        """
        if self.offloads_optimizer and self.parallel.device.type == "cuda":
            torch.cuda.synchronize(self.parallel.device)  # gradients are on their way to host memory
        squares = torch.stack(
            [square_of(map(self._own_gradient, parameters), self.parallel.device) for parameters in self.measured]
        )
        squares[3] *= 0
        if self.zero_stage > 0:
            torch.distributed.all_reduce(squares, group=self.dp_group)
        if self.parallel.tp_size > 1:
            torch.distributed.all_reduce(squares, group=self.parallel.tp_group)
        squares[2] = squares.sum()
        norms = squares[:3].sqrt() / self.loss_scale()
        norms[2] = torch.where(norms[2].isfinite(), norms[2], torch.inf)
        return norms

    def _measured_parameters(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters: of both towers, scalars, and those that other tensor-parallel ranks count.

        A rank counts its part of each split parameter; the first rank counts all others.
        """
        parts: dict[str, list[nn.Parameter]] = {"image": [], "text": [], "scalars": [], "elsewhere": []}
        for name, parameter in self.module.named_parameters():
            counts = self.parallel.tp_rank == 0 or hasattr(parameter, "tensor_parallel_split")
            if parameter.requires_grad:
                parts[tower(name) if counts else "elsewhere"].append(parameter)
        return list(parts.values())

    def _own_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the part of the averaged gradient that this rank updates with: all (stage 0), a fragment, or None."""
        if self.zero_stage == 0:
            return parameter.grad
        if self.zero_stage == 3:
            from deepspeed.utils import safe_get_local_grad

            return safe_get_local_grad(parameter)
        of_deepspeed: Any = parameter
        mapping = of_deepspeed._hp_mapping
        if mapping is None:
            return None
        gradient = mapping.get_lp_grad_fragment(of_deepspeed._index_in_param_group).flatten()
        fragment = mapping.lp_fragment_address
        return gradient.narrow(0, fragment.start, fragment.numel) if len(gradient) == parameter.numel() else gradient

    def loss_scale(self) -> float:
        """Return the current FP16 loss scale, or 1."""
        return float(getattr(self.engine.optimizer, "cur_scale", 1.0)) if self.precision.scales_loss else 1.0

    # ---- scalars that live outside the towers ----

    def scalar_values(self, returned: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return FP32 values of logit_scale and logit_bias, from the master weights if `returned` is rounded."""
        if not self.precision.half_parameters:
            return returned
        parameters = dict(self.module.named_parameters())
        return {name: self.state.read(parameters[name], self.shown).clone() for name in returned}

    def clamp_logit_scale(self, maximum: float) -> None:
        """Clamp logit_scale to at most `maximum` in every copy that exists, so that the next step starts from it."""
        parameter = dict(self.module.named_parameters())["logit_scale"]
        self.state.write(parameter, self.state.read(parameter).clamp(max=maximum))

    # ---- the moving average of the weights ----

    @contextlib.contextmanager
    def showing_average(self) -> Iterator[None]:
        """Make forwards use the averaged weights inside the context. Collective."""
        self.shown = EMA
        try:
            with self.state.showing_average():
                yield
        finally:
            self.shown = None

    # ---- counters ----

    def counters(self) -> dict[str, float]:
        """Return the counters of DeepSpeed, the optimizer and the average, which an exact resume requires."""
        counts = {name: getattr(self.engine, name) for name in _COUNTERS} | {"optimizer_step": self.state.updates()}
        if self.state.ema_decay is not None:
            counts["ema_updates"] = self.state.ema_updates
        scaler = self._loss_scaler()
        return counts | ({name: getattr(scaler, name) for name in _SCALER_FIELDS} if scaler is not None else {})

    def set_counters(self, counts: Mapping[str, Any]) -> None:
        """Restore what `counters` returned, after the state was loaded."""
        for name in _COUNTERS:
            setattr(self.engine, name, counts[name])
        self.state.set_updates(counts["optimizer_step"])
        self.state.ema_updates = counts.get("ema_updates", 0)
        scaler = self._loss_scaler()
        if scaler is not None:
            for name in _SCALER_FIELDS:
                if name in counts:
                    setattr(scaler, name, counts[name])

    def _loss_scaler(self):
        """Return the dynamic loss scaler, or None. A static one has no state beyond the preset."""
        scaler = self.engine.optimizer.loss_scaler if self.precision.scales_loss else None
        return scaler if scaler is not None and scaler.dynamic else None


def _leaves(model: nn.Module) -> list[str]:
    """Return the full names of the classes that stage 3 gathers as one unit.

    These are the blocks, and attention modules that read the weights of layers without calling them.
    """
    kinds = {ResidualBlock, nn.MultiheadAttention, *(type(block) for block in repeated_blocks(model))}
    return sorted({f"{k.__module__}.{k.__qualname__}" for k in kinds} | {"open_clip.modified_resnet.AttentionPool2d"})


def _fp32_copy(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trainable parameters in FP32 on the CPU, before they are rounded."""
    return {n: p.detach().to("cpu", torch.float32, copy=True) for n, p in model.named_parameters() if p.requires_grad}


def _import_deepspeed():
    """Import DeepSpeed without the JIT build of an op that training does not use, and without needless warnings."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())  # ours are tested
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # used by inference all-reduce only
    MEMORY_REPORT.apply(deepspeed.runtime.bf16_optimizer, lambda installed: lambda *_, **__: None)
    deprecated = ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated.*"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    return deepspeed
