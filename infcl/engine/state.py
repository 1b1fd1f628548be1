"""Read and write full values of the state that ZeRO shards, by parameter: FP32 weights, optimizer state, averages.

ZeRO passes flat tensors to the optimizer. A rank's flat tensor holds slices of some of its group's parameters:

    stage 0   each parameter is its own tensor, full on every rank
    1, 2      a rank's flat tensor is a slice of the concatenation of all the group's parameters
    3         a rank's flat tensor holds an equal slice of each parameter of a sub-group

A `Piece` is such a slice. This module reads the layouts from DeepSpeed 0.19.8. Reads and writes are collective: all
ranks make the same calls in the same order. A read returns the full tensor on every rank. A write takes the full tensor
on every rank, and each rank stores its part. A written FP32 weight is also copied into the parameter that the forward
uses.

A parameter that is split over tensor-parallel ranks has a Split (megatron_patches/split.py). Its full value then covers
those ranks too, so callers never see parts.

The optimizer's state is created at start, not at the first step. So it can be read and written at any time.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infcl.engine.blockwise import Blockwise

EMA = "ema"  # key of the weights' moving average


@dataclass(frozen=True)
class Piece:
    """This rank's slice of a parameter. All ranks list the same parameters per tensor, in the same order.

    Attributes:
        tensor: the tensor that the optimizer updates.
        offset: index of the slice in the flattened `tensor`.
        start: index of the slice in the flattened parameter.
        numel: length of the slice; 0 if this rank owns no element of the parameter.
    """

    name: str
    shape: torch.Size
    tensor: torch.Tensor
    offset: int
    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of `flat`, a tensor laid out like `self.tensor`: a view, [numel]."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    def lift(self, values: torch.Tensor) -> torch.Tensor:
        """Place the piece in the full parameter: [numel] -> shape, with zeros elsewhere."""
        lifted = values.new_zeros(self.shape.numel())
        lifted.narrow(0, self.start, self.numel).copy_(values)
        return lifted.view(self.shape)

    def lower(self, lifted: torch.Tensor) -> torch.Tensor:
        """Undo `lift`: shape -> [numel]."""
        return lifted.reshape(-1).narrow(0, self.start, self.numel)


class ZeroState:
    """Sharded state of a DeepSpeedEngine, by parameter.

    Args:
        engine: a DeepSpeedEngine with an optimizer of infcl.engine.parameter_groups.

    Attributes:
        ema_decay: decay of the weights' moving average; None if there is no average.
        ema_updates: number of updates of the average.
    """

    def __init__(self, engine, stage: int):
        self.engine, self.stage = engine, stage
        self.group = engine.seq_data_parallel_group
        self.optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self.pieces = dict(self._read_layout(names))
        self.tensors = list({id(piece.tensor): piece.tensor for piece in self.pieces.values()}.values())
        self.ema_decay: float | None = None
        self.ema_updates = 0
        self._create_optimizer_state()

    def start_average(self, decay: float) -> None:
        """Start a moving average at the current weights, in FP32, on each weight's device."""
        self.ema_decay, self.ema_updates = decay, 0
        for tensor in self.tensors:
            self.optimizer.state[tensor][EMA] = tensor.detach().clone()

    @torch.no_grad()
    def update_average(self) -> None:
        """Update the moving average, if there is one. Call it once per optimizer step that was not skipped.

            average <- average + (1 - d) (weight - average),  d = min(decay, (1 + n) / (10 + n)) at update n = 0, 1, ...

        The decay is small at first, so that the average forgets the initial weights (as in TensorFlow's
        ExponentialMovingAverage with num_updates). Each rank averages the elements that it owns.
        """
        if self.ema_decay is not None:
            decay = min(self.ema_decay, (1 + self.ema_updates) / (10 + self.ema_updates))
            self.ema_updates += 1
            averages = [self.optimizer.state[tensor][EMA] for tensor in self.tensors]
            torch._foreach_lerp_(averages, [tensor.detach() for tensor in self.tensors], 1 - decay)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the model's parameters with their names."""
        return list(self.engine.module.named_parameters())

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the state dict's entries that are not parameters (running statistics). They are equal on all ranks."""
        names = {name for name, _ in self.parameters()}
        return [(name, value) for name, value in self.engine.module.state_dict().items() if name not in names]

    def shape(self, parameter: nn.Parameter, key: str | None = None) -> torch.Size:
        """Return the shape of the full parameter or state. Under stage 3 the parameter is empty between steps."""
        split, part = _split(parameter), self._part_shape(parameter, key)
        return part if split is None else split.full_shape(part)

    def keys(self, parameter: nn.Parameter) -> list[str]:
        """Return the keys of a parameter's optimizer state and `EMA`, or [] if it is frozen."""
        if parameter not in self.pieces:
            return []
        piece = self.pieces[parameter]
        state = self.optimizer.state[piece.tensor]
        sharded = [key for key in state if key != "step" and "/" not in key]
        return sharded + [key.partition("/")[0] for key in state if key.endswith(f"/{piece.name}")]

    @torch.no_grad()
    def read(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Return a full FP32 master weight or state. Collective.

        Args:
            key: one of `keys`, or None for the weight.

        Returns:
            The full tensor, f32, on the device. It may share memory with the state.
        """
        split, part = _split(parameter), self._read_part(parameter, key)
        return part if split is None else split.full(part)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Set a master weight (and the parameter), or a state, from a full tensor that every rank has. Collective."""
        split = _split(parameter)
        value = value.to(self.engine.device, torch.float32).view(self.shape(parameter, key))
        self.write_part(parameter, value if split is None else split.part(value), key)

    def _read_part(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        if parameter not in self.pieces:
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            with GatheredParameters([parameter]):  # without effect below stage 3
                return parameter.detach().clone().float()
        stored, piece = self._stored(parameter, key)
        if piece is None:
            return stored.detach().to(self.engine.device, torch.float32)
        own = stored.read(piece.offset, piece.numel) if isinstance(stored, Blockwise) else piece.of(stored)
        if self.stage == 0:
            return own.float().view(piece.shape)
        full = torch.zeros(piece.shape.numel(), dtype=torch.float32, device=self.engine.device)
        full.narrow(0, piece.start, piece.numel).copy_(own)
        dist.all_reduce(full, group=self.group)
        return full.view(piece.shape)

    @torch.no_grad()
    def write_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Do `write` with this tensor-parallel rank's part of the value; without a split, that is the full value."""
        if parameter in self.pieces:
            stored, piece = self._stored(parameter, key)
            if piece is None:
                stored.copy_(value.view(stored.shape))
            elif isinstance(stored, Blockwise):
                stored.write(piece.offset, value.reshape(-1).narrow(0, piece.start, piece.numel))
            else:
                piece.of(stored).copy_(value.reshape(-1).narrow(0, piece.start, piece.numel))
        if key is None:
            self._show(parameter, value)

    def write_first_copy(self, values: dict[str, torch.Tensor]) -> None:
        """Set the FP32 weights from `values`, {name: tensor}, of data-parallel rank 0. Collective."""
        source = dist.get_global_rank(self.group, 0)
        for name, parameter in self.parameters():
            if parameter in self.pieces:
                full = torch.empty(self._part_shape(parameter), dtype=torch.float32, device=self.engine.device)
                if dist.get_rank() == source:
                    full.copy_(values.pop(name))
                dist.broadcast(full, source, group=self.group)
                self.write_part(parameter, full)

    @contextlib.contextmanager
    def showing_average(self) -> Iterator[None]:
        """Replace the module's parameters by the averages inside the context, then restore them exactly. Collective."""
        kept = [tensor.detach().clone() for tensor in self.tensors]  # under stages 0 and 3 they may be the parameters
        for parameter in self.pieces:
            self._show(parameter, self._read_part(parameter, EMA))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, values in zip(self.tensors, kept):
                    tensor.copy_(values)
            for parameter in self.pieces:
                self._show(parameter, self._read_part(parameter, None).clone())

    def updates(self) -> int:
        """Return the number of steps that the optimizer has made; all groups have the same number."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def set_updates(self, step: int) -> None:
        """Set the number of steps. Call it after the state was restored, since it also quantizes 8-bit states."""
        for state in self.optimizer.state.values():
            state["step"].fill_(float(step))
            for value in state.values():
                if isinstance(value, Blockwise):
                    value.settle()

    # ---- layout ----

    def _part_shape(self, parameter: nn.Parameter, key: str | None = None) -> torch.Size:
        if parameter not in self.pieces:
            return getattr(parameter, "ds_shape", parameter.shape)
        stored, piece = self._stored(parameter, key)
        return stored.shape if piece is None else piece.shape

    def _stored(self, parameter: nn.Parameter, key: str | None) -> tuple[Any, Piece | None]:
        """Return the flat tensor (or Blockwise) of a state and the parameter's piece of it.

        A state that is full on every rank is returned with None.
        """
        piece = self.pieces[parameter]
        state = self.optimizer.state[piece.tensor]
        if key is None:
            return piece.tensor, piece
        return (state[key], piece) if key in state else (state[f"{key}/{piece.name}"], None)

    @torch.no_grad()
    def _show(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the parameter that the forward uses."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0):  # without effect below stage 3
            parameter.copy_(value.view(parameter.shape))

    def _read_layout(self, names: dict[nn.Parameter, str]) -> Iterator[tuple[nn.Parameter, Piece]]:
        zero = self.engine.optimizer
        if self.stage == 0:
            for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
                yield parameter, Piece(names[parameter], parameter.shape, parameter, 0, 0, parameter.numel())
        elif self.stage == 3:
            rank = dist.get_rank(self.group)
            for parameter in (parameter for group in zero.fp16_groups for parameter in group):
                group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = min(rank * size, parameter.ds_numel)
                numel = min(size, parameter.ds_numel - start)
                flat = zero.fp32_partitioned_groups_flat[group]
                yield parameter, Piece(names[parameter], parameter.ds_shape, flat, offset, start, numel)
        else:
            is_bf16 = hasattr(zero, "fp32_groups_flat_partition")  # BF16_Optimizer: stage 1, gradients kept in fp32
            groups = zero.bf16_groups if is_bf16 else zero.bit16_groups
            flats = zero.fp32_groups_flat_partition if is_bf16 else zero.single_partition_of_fp32_groups
            for group, flat in zip(groups, flats):
                for parameter in group:
                    mapping = parameter._hp_mapping
                    offset = start = numel = 0
                    if mapping is not None:
                        start, offset = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
                        numel = mapping.lp_fragment_address.numel
                    yield parameter, Piece(names[parameter], parameter.shape, flat, offset, start, numel)

    def _create_optimizer_state(self) -> None:
        """Create the optimizer's state now, for the tensors that its first step will update."""
        by_tensor: dict[torch.Tensor, list[Piece]] = {tensor: [] for tensor in self.tensors}
        for piece in self.pieces.values():
            by_tensor[piece.tensor].append(piece)
        for tensor, pieces in by_tensor.items():
            self.optimizer.create_state(tensor, pieces, None if self.stage == 0 else self.group)
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # DeepSpeed's own mapping; needs the state


def _split(parameter: nn.Parameter):
    return getattr(parameter, "tensor_parallel_split", None)
