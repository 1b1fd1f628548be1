"""Whole values of state that ZeRO shards: fp32 masters and Adam moments, read and written by parameter, in every stage.

What a parameter means under each stage (DeepSpeed 0.19.8):

    0        the module's parameter and torch's optimizer state are whole on every rank
    1, 2     a rank owns slices of flat fp32 groups; DeepSpeed maps parameters to slices (`safe_get_full_*`)
    3        a rank owns an equal, padded slice of every parameter

Reading is collective: every rank calls it, in the same order, and gets the whole tensor. So is writing: every rank is
given the whole tensor and keeps its part. A written master is copied into the parameter that the forward sees too.

A parameter that tensor-parallel ranks hold in parts carries its Split (megatron_patches/split.py); whole then means
whole over those ranks too, so that nothing above this file sees parts.

Adam's state is created at start, not at the first step, so that there always is something to read and write.
"""

import torch
from torch import nn

ADAM_KEYS = ("exp_avg", "exp_avg_sq")


class ZeroState:
    """`engine` is a DeepSpeedEngine around a torch AdamW; `stage` its ZeRO stage."""

    def __init__(self, engine, stage: int):
        self.engine, self.stage = engine, stage
        self.adam = engine.optimizer if stage == 0 else engine.optimizer.optimizer
        self._create_adam_state()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.engine.module.named_parameters())

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of the whole parameter; under stage 3 the parameter itself is empty between forwards."""
        split = getattr(parameter, "tensor_parallel_split", None)
        return _part_shape(parameter) if split is None else split.whole_shape(_part_shape(parameter))

    @torch.no_grad()
    def read(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """The whole fp32 master (key None) or Adam moment, on the device. Collective."""
        split = getattr(parameter, "tensor_parallel_split", None)
        part = self._read_part(parameter, key)
        return part if split is None else split.whole(part)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Set the master (and the parameter) or an Adam moment from a whole tensor that every rank holds."""
        split = getattr(parameter, "tensor_parallel_split", None)
        value = value.to(self.engine.device, torch.float32).view(self.shape(parameter))
        self.write_part(parameter, value if split is None else split.part(value), key)

    def _read_part(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        if self.stage == 0:
            value = parameter if key is None else self.adam.state[parameter][key]
        elif parameter.requires_grad:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            if key is None:
                value = safe_get_full_fp32_param(parameter)
            else:
                value = safe_get_full_optimizer_state(parameter, key)
        elif self.stage == 3:
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            with GatheredParameters([parameter]):
                value = parameter.detach().clone()
        else:
            value = parameter
        return value.detach().float().view(_part_shape(parameter))

    @torch.no_grad()
    def write_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """`write` from what the data-parallel ranks of this tensor-parallel rank hold: all of it, without a split."""
        value = value.to(self.engine.device, torch.float32).view(_part_shape(parameter))
        if self.stage == 0:
            (parameter if key is None else self.adam.state[parameter][key]).copy_(value)
        elif self.stage == 3:
            self._write_stage_3(parameter, value, key)
        else:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

            if key is not None:
                safe_set_full_optimizer_state(parameter, value, key)
                return
            if parameter.requires_grad:
                safe_set_full_fp32_param(parameter, value)
            parameter.copy_(value)

    def adam_step(self) -> int:
        """Updates that Adam has made; the same for all its groups."""
        return int(next(iter(self.adam.state.values()))["step"])

    def set_adam_step(self, step: int) -> None:
        for state in self.adam.state.values():
            state["step"].fill_(float(step))

    def _write_stage_3(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """DeepSpeed's own whole-tensor setter does not pad and fails where a shard is not full; set the local shard."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param, safe_set_local_optimizer_state

        if parameter.requires_grad:
            size = safe_get_local_fp32_param(parameter).numel()
            rank = torch.distributed.get_rank(self.engine.seq_data_parallel_group)
            shard = value.new_zeros(size)
            own = value.flatten()[rank * size : (rank + 1) * size]
            shard[: own.numel()] = own
            if key is not None:
                safe_set_local_optimizer_state(parameter, shard, key)
                return
            safe_set_local_fp32_param(parameter, shard)
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value)

    def _create_adam_state(self) -> None:
        """What torch's AdamW creates at its first step, for the tensors that it will be given then."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            tensors = [p for group in self.adam.param_groups for p in group["params"]]
        elif self.stage == 3:
            tensors = optimizer.fp32_partitioned_groups_flat
        elif hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer: stage 1, gradients kept in fp32
            tensors = optimizer.fp32_groups_flat_partition
        else:
            tensors = optimizer.single_partition_of_fp32_groups
        fused = bool(self.adam.defaults["fused"])
        for tensor in tensors:
            self.adam.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
        if self.stage in (1, 2):
            optimizer._lazy_init_hp_params_optimizer_state()  # maps parameters to their slices of the moments


def _part_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
