"""Optimizers for ZeRO's flat tensors, which hold a different slice of the parameters on each rank.

    AdamW       torch's, fused on a GPU or if offloaded
    AdamW8bit   both moments in 8 bits: bitsandbytes' kernel on states of blockwise.py
    Lion        Chen et al. 2023, arXiv 2302.06675; elementwise, so slices make no difference
    Lamb        You et al. 2020, arXiv 1904.00962; norms of full parameters
    AdaFactor   as modified for ViT-g: Zhai et al. 2022, arXiv 2106.04560; rows and columns of full matrices

Lamb and AdaFactor sum over the ranks: a few numbers per parameter, or one per row and column. This takes one or two
all-reduces per tensor. So the update is that of full parameters in every ZeRO stage.

Each class has `create_state(tensor, pieces, group)`, which creates the state that the first step would create. `tensor`
is one that the optimizer updates, and `pieces` are the parameters in it. `group` has the ranks that hold the rest of
them (None: the tensor is complete). State of the tensor's shape (or `Blockwise`) is a slice like the tensor itself.
State named "KEY/PARAMETER" is full on every rank.

Weight decay is decoupled, param *= 1 - lr * weight_decay, except in Lamb, where it is part of the update.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from infcl.engine.blockwise import Blockwise, tables
from infcl.engine.state import Piece

MIN_8BIT_SIZE = 4096
_TINY = 1e-30  # added to squared gradients, so that a row of zero gradients has a second moment


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with its state created at start.

    DeepSpeed's variants compile a kernel at start (docs/concepts/engine.md).
    """

    def create_state(self, tensor: torch.Tensor, pieces: list[Piece], group: dist.ProcessGroup | None) -> None:
        step = torch.zeros((), device=tensor.device if self.defaults["fused"] else "cpu")
        self.state[tensor] = {"step": step} | _moments(tensor)


class _ByPiece(torch.optim.Optimizer):
    """Base class: calls `_update(tensor, gradient, state, options)` for every tensor with a gradient."""

    _update: Callable[[torch.Tensor, torch.Tensor, dict, dict], None]

    def __init__(self, params, **defaults):
        super().__init__(params, {"weight_decay": 0.0} | defaults)
        self.layouts: dict[torch.Tensor, tuple[list[Piece], dist.ProcessGroup | None]] = {}

    def create_state(self, tensor: torch.Tensor, pieces: list[Piece], group: dist.ProcessGroup | None) -> None:
        self.layouts[tensor] = pieces, group
        self.state[tensor] = {"step": torch.zeros(())} | self._new_state(tensor, pieces)

    def _new_state(self, tensor, pieces):
        return _moments(tensor)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self.state[tensor]["step"] += 1
                    self._update(tensor, tensor.grad, self.state[tensor], group)

    def _sums(self, tensor: torch.Tensor, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add up sums over this rank's pieces to sums over full parameters, with one all-reduce. Collective."""
        _, group = self.layouts[tensor]
        if group is None or dist.get_world_size(group) == 1 or not sums:
            return sums
        joined = torch.cat([value.reshape(-1) for value in sums])
        on_group = joined.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")  # the state may be in host memory
        dist.all_reduce(on_group, group=group)
        parts = on_group.to(joined.device).split([value.numel() for value in sums])
        return [part.view(value.shape) for part, value in zip(parts, sums)]

    def _squared_norms(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of each parameter's part of `values` (laid out as `tensor`), [parameters] f32."""
        pieces, _ = self.layouts[tensor]
        return torch.stack([piece.of(values).float().square().sum() for piece in pieces])

    def _per_element(self, tensor: torch.Tensor, factors: torch.Tensor, values: torch.Tensor) -> None:
        """Multiply each parameter's part of `values` by its factor, in place."""
        pieces, _ = self.layouts[tensor]
        for piece, factor in zip(pieces, factors.unbind()):
            piece.of(values).mul_(factor)


class Lion(_ByPiece):
    """Lion: the update is sign(b1 m + (1 - b1) g); then m <- b2 m + (1 - b2) g. The only state is `exp_avg`."""

    def _new_state(self, tensor, pieces):
        return {"exp_avg": torch.zeros_like(tensor)}

    def _update(self, tensor, gradient, state, options):
        beta1, beta2 = options["betas"]
        tensor.mul_(1 - options["lr"] * options["weight_decay"])
        tensor.add_(state["exp_avg"].lerp(gradient, 1 - beta1).sign_(), alpha=-options["lr"])
        state["exp_avg"].lerp_(gradient, 1 - beta2)


class AdamW8bit(_ByPiece):
    """AdamW with 8-bit moments for tensors of 4096 elements or more and FP32 for others, as in bitsandbytes."""

    def __init__(self, params, **defaults):
        super().__init__(params, **defaults)
        self.tables = tables()

    def _new_state(self, tensor, pieces):
        if tensor.numel() < MIN_8BIT_SIZE:
            return _moments(tensor)
        moments = (Blockwise(tensor.numel(), table, tensor.device) for table in self.tables)
        return dict(zip(("exp_avg", "exp_avg_sq"), moments))

    def _update(self, tensor, gradient, state, options):
        if isinstance(state["exp_avg"], torch.Tensor):
            tensor.mul_(1 - options["lr"] * options["weight_decay"])
            tensor.add_(_adam_update(gradient, state, options), alpha=-options["lr"])
            return
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        (beta1, beta2), m, v = options["betas"], state["exp_avg"], state["exp_avg_sq"]
        flat, flat_gradient = tensor.view(-1), gradient.reshape(-1)
        optimizer_update_8bit_blockwise(
            "adam", flat_gradient, flat, m.codes, v.codes, beta1, beta2, 0.0, 0.0, options["eps"], int(state["step"]),
            options["lr"], m.table, v.table, m.largest, v.largest, options["weight_decay"],
        )  # fmt: skip


class Lamb(_ByPiece):
    """LAMB: Adam's update plus weight decay, scaled per parameter by |parameter| / |update|.

    Parameters without weight decay (norms, biases) use Adam's update unscaled, as in the authors' code.
    """

    def _update(self, tensor, gradient, state, options):
        update = _adam_update(gradient, state, options)
        if options["weight_decay"]:
            update.add_(tensor, alpha=options["weight_decay"])
            own = torch.stack([self._squared_norms(tensor, values) for values in (tensor, update)])
            weight_norms, update_norms = self._sums(tensor, [own])[0].sqrt()
            neither_is_zero = (weight_norms > 0) & (update_norms > 0)
            self._per_element(tensor, torch.where(neither_is_zero, weight_norms / update_norms, 1.0), update)
        tensor.add_(update, alpha=-options["lr"])


class AdaFactor(_ByPiece):
    """AdaFactor: second moments as outer products of row and column means, capped beta2, momentum in BF16.

        beta2_t = min(beta2_cap, 1 - t^-0.8)
        v       = factored EMA of g^2 for parameters of groups with "factored", else an EMA of g^2 per element
        u       = g / sqrt(v), scaled down to a root mean square of `clipping_threshold` per parameter
        m       = beta1 m + (1 - beta1) u    (computed in FP32, stored in BF16)
        param  -= lr m

    The update is not scaled by the parameter's magnitude and has no bias correction. Rows and columns are the two
    largest dimensions.
    """

    def __init__(
        self,
        params,
        *,
        lr: float,
        momentum: float,
        beta2_cap: float,
        clipping_threshold: float = 1.0,
        momentum_dtype: torch.dtype = torch.bfloat16,
    ):
        self.momentum_dtype = momentum_dtype
        self.sizes: dict[torch.Tensor, torch.Tensor] = {}  # number of elements per parameter
        options = {"momentum": momentum, "beta2_cap": beta2_cap, "clipping_threshold": clipping_threshold}
        super().__init__(params, lr=lr, factored=False, **options)

    def _new_state(self, tensor, pieces):
        self.sizes[tensor] = torch.tensor([float(piece.shape.numel()) for piece in pieces], device=tensor.device)
        state = {"exp_avg": torch.zeros_like(tensor, dtype=self.momentum_dtype)}
        factored = [piece for piece in pieces if factored_dims(piece.shape)]
        if not factored:
            return state | {"exp_avg_sq": torch.zeros_like(tensor)}
        assert len(factored) == len(pieces), "a tensor holds parameters that factor, or none"
        for piece in pieces:
            for key, dim in zip(_MEANS, _dims_of(piece)):
                shape = [1 if i == dim else size for i, size in enumerate(piece.shape)]
                state[f"{key}/{piece.name}"] = tensor.new_zeros(shape)
        return state

    def _update(self, tensor, gradient, state, options):
        beta2 = min(options["beta2_cap"], 1 - float(state["step"]) ** -0.8)
        if "exp_avg_sq" in state:
            update = gradient * state["exp_avg_sq"].lerp_(gradient.square() + _TINY, 1 - beta2).rsqrt()
        else:
            update = self._factored_update(tensor, gradient, state, beta2)
        pieces, _ = self.layouts[tensor]
        (squares,) = self._sums(tensor, [self._squared_norms(tensor, update)])
        excess = (squares / self.sizes[tensor]).sqrt() / options["clipping_threshold"]
        self._per_element(tensor, 1 / excess.clamp(min=1.0), update)
        tensor.mul_(1 - options["lr"] * options["weight_decay"])
        for piece in pieces:  # one at a time, so that only one momentum has an FP32 copy
            momentum = piece.of(state["exp_avg"])
            momentum.copy_(momentum.float().lerp_(piece.of(update), 1 - options["momentum"]))
            piece.of(tensor).add_(momentum, alpha=-options["lr"])

    def _factored_update(self, tensor, gradient, state, beta2):
        pieces, _ = self.layouts[tensor]
        sums = [part for piece in pieces for part in self._own_sums(piece, gradient)]
        sums = iter(self._sums(tensor, sums))
        update = torch.zeros_like(gradient)  # zeros remain where a flat tensor is padded
        for piece in pieces:
            means = []
            for key, dim in zip(_MEANS, _dims_of(piece)):
                mean = state[f"{key}/{piece.name}"]
                means.append(mean.lerp_(next(sums) / piece.shape[dim], 1 - beta2))
            row, column = means
            row = (row / row.mean(dim=_dims_of(piece)[1], keepdim=True)).rsqrt()
            scaled = piece.lift(piece.of(gradient)).mul_(row).mul_(column.rsqrt())
            piece.of(update).copy_(piece.lower(scaled))
        return update

    @staticmethod
    def _own_sums(piece: Piece, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of this rank's squared gradients over each factored dimension, in the shapes of the means."""
        squares = piece.lift(piece.of(gradient).square() + _TINY)
        return [squares.sum(dim=dim, keepdim=True) for dim in _dims_of(piece)]


def _moments(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}


def _adam_update(gradient: torch.Tensor, state: dict, options: dict) -> torch.Tensor:
    """Update both moments with the gradient and return Adam's bias-corrected update."""
    (beta1, beta2), step = options["betas"], float(state["step"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(options["eps"])
    return (state["exp_avg"] / (1 - beta1**step)).div_(root)


_MEANS = ("exp_avg_sq_row", "exp_avg_sq_col")  # means over the largest dimension, and over the second largest
MIN_FACTORED_SIZE = 32  # as in big_vision: smaller matrices have a second moment per element


def factored_dims(shape: torch.Size) -> tuple[int, int] | None:
    """Return the largest and second largest dimension, or None if the second is below MIN_FACTORED_SIZE."""
    if len(shape) < 2:
        return None
    second, largest = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))[-2:]
    return (largest, second) if shape[second] >= MIN_FACTORED_SIZE else None


def _dims_of(piece: Piece) -> tuple[int, int]:
    dims = factored_dims(piece.shape)
    assert dims is not None, f"{piece.name} {tuple(piece.shape)} is not factored"
    return dims
