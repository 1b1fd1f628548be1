"""The contrastive loss in Megatron-LM's own training loop. (The other modules serve infcl's trainer.)

    from megatron_patches.megatron_lm import ContrastiveStep, share_one_loss

    step = ContrastiveStep(get_batch, encode)
    share_one_loss()                     # optional: one loss over all micro-batches of a step, not one loss for each
    pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, step)

    get_batch(data_iterator) -> a micro-batch, whatever `encode` takes; equal on tensor-parallel ranks
    encode(model, batch)     -> {"image_features": [m, D], "text_features": [m, D], "logit_scale": [1], log-space, and
                                maybe "logit_bias": [1]}; features L2-normalised, equal on tensor-parallel ranks

The ring runs over Megatron's data-parallel ranks, or over tensor- x data-parallel ranks, each with its share of the
samples. The loss follows the convention of Megatron's data parallelism: the mean of the gradients over data-parallel
ranks is the gradient of the global loss.

Megatron computes one loss per micro-batch and averages them, so a contrastive loss would see D x m samples at a time.
`share_one_loss` patches one symbol, `megatron.training.training.get_forward_backward_func`, so that a step of M
micro-batches is a gradient cache. The loss then sees D x M x m samples, with the activation memory of one micro-batch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_model_config
from torch import nn

from infcl.loss.contrastive import ContrastiveLoss
from infcl.parallel import micro_batch_seed
from infcl.step.grad_cache import Features, by_name, cached_step, random_state, set_random_state
from megatron_patches.groups import check_layout
from megatron_patches.loss import TensorParallelLoss
from megatron_patches.patches import apply_patches, patch

REPORT = "contrastive loss"  # name of the loss in Megatron's log
UNSUPPORTED = (  # options of Megatron's config that its schedule supports and `one_loss_step` does not
    "num_moe_experts",
    "mtp_num_layers",
    "overlap_moe_expert_parallel_comm",
    "hybrid_context_parallel",
    "cuda_graph_impl",
    "fine_grained_activation_offloading",
)


class ContrastiveStep:
    """Megatron's forward_step_func for two towers.

    Args:
        get_batch: data_iterator -> a micro-batch.
        encode: (model, micro-batch) -> features; see the module's docstring.
        name, options: arguments of infcl's ContrastiveLoss, except its group.

    Raises:
        ValueError: the loss or an option does not exist, or Megatron uses pipeline or context parallelism. The latter
            is checked on every rank when Megatron's groups exist: here, or before the first micro-batch is read.
    """

    def __init__(
        self,
        get_batch: Callable[[Iterator], Any],
        encode: Callable[[nn.Module, Any], Features],
        *,
        name: str = "inf_cl",
        **options: Any,
    ):
        self.get_batch, self.encode, self.name, self.options = get_batch, encode, name, options
        ContrastiveLoss(name, **options)  # reject an unknown option before Megatron starts
        check_layout()

    def __call__(self, data_iterator: Iterator, model: nn.Module) -> tuple[Features, Callable]:
        """Encode one micro-batch; return its features and the function with which Megatron computes the loss."""
        _ = self.loss  # the first use rejects a pipeline on all ranks; only its last stage computes the loss
        return self.encode(model, self.get_batch(data_iterator)), self.loss_func

    def loss_func(self, features: Features) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of a micro-batch.

        Returns:
            The loss.
            1. Under calculate_per_token_loss Megatron sums gradients over data-parallel ranks and micro-batches and
            divides by the sum of these values; otherwise it has no effect.
            The report: {name: [sum, count]}, which Megatron adds up over data-parallel ranks.
        """
        value = self.loss(
            features["image_features"],
            features["text_features"],
            features["logit_scale"].float().exp(),
            features.get("logit_bias"),
        )
        return value, torch.ones_like(value, dtype=torch.int32), report(value)

    @cached_property
    def loss(self) -> nn.Module:
        """The loss, made on first use, when Megatron's groups exist."""
        check_layout()
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return ContrastiveLoss(self.name, group=parallel_state.get_data_parallel_group(), **self.options)
        tp_group = parallel_state.get_tensor_model_parallel_group()
        apply_patches(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        inner = ContrastiveLoss(self.name, group=parallel_state.get_tensor_and_data_parallel_group(), **self.options)
        return TensorParallelLoss(inner, tp_group)


def share_one_loss() -> None:
    """Patch Megatron-LM to compute one loss over all micro-batches of a step with a ContrastiveStep. Idempotent.

    Steps with another forward_step_func run as before.

    Raises:
        RuntimeError: Megatron-LM's training loop cannot be imported or has another signature.
        ValueError: Megatron uses pipeline or context parallelism. Raised here if its groups exist, else by the step.
    """
    check_layout()
    symbol = "megatron.training.training.get_forward_backward_func"
    patch(symbol, ("pp_size", "vp_size"), _wrap, "takes a loss per micro-batch, a contrastive loss needs all of them")


def report(value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {REPORT: torch.stack([value.detach().float(), torch.ones_like(value, dtype=torch.float32)])}


def _wrap(installed: Callable) -> Callable:
    def get_forward_backward_func(*args, **kwargs):
        schedule = installed(*args, **kwargs)

        @functools.wraps(schedule)
        def forward_backward(*, forward_step_func, collect_non_loss_data=False, **given):
            if isinstance(forward_step_func, ContrastiveStep):
                check_layout()  # on every stage of a pipeline
            if isinstance(forward_step_func, ContrastiveStep) and not collect_non_loss_data:
                return one_loss_step(forward_step_func, **given)
            return schedule(forward_step_func=forward_step_func, collect_non_loss_data=collect_non_loss_data, **given)

        return forward_backward

    return get_forward_backward_func


def one_loss_step(
    step: ContrastiveStep,
    *,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    first_val_step: bool | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
    **unused: Any,
) -> list[dict[str, torch.Tensor]]:
    """Run a step's forwards and backwards in place of Megatron's schedule; return one report for all micro-batches.

    As in Megatron's schedule without pipelining, the model's hooks accumulate gradients. The functions of the model's
    config synchronise them at the last backward and finalise them.

    Raises:
        ValueError: the config sets an option that only Megatron's own schedule supports (UNSUPPORTED).
    """
    module, micro_batches = _first(model), _first(data_iterator)
    config, loss = get_model_config(module), step.loss
    for name in UNSUPPORTED:
        if (value := getattr(config, name, None)) not in (None, False, 0, "none"):
            raise ValueError(f"{name} {value} is for Megatron's own schedule: share_one_loss does not support it")
    if hasattr(module, "set_is_first_microbatch") and (not forward_only or first_val_step is not False):
        module.set_is_first_microbatch()  # refresh cached FP8 weights
    batches = [step.get_batch(micro_batches) for _ in range(num_microbatches)]
    if forward_only:
        with torch.no_grad():
            features = [_encode(step, module, config, batch) for batch in batches]
            joined = {name: torch.cat([one[name] for one in features]) for name in ("image_features", "text_features")}
            return [step.loss_func({**features[-1], **joined})[-1]]

    def backward(surrogate: torch.Tensor, is_last: bool) -> None:
        if config.grad_scale_func is not None:
            surrogate = config.grad_scale_func(surrogate)
        later = config.no_sync_func if config.no_sync_func is not None and not is_last else contextlib.nullcontext
        with later():
            surrogate.backward()

    before = random_state()
    output = cached_step(
        range(len(batches)),
        encode=lambda index: _encode(step, module, config, batches[index]),
        loss=by_name(loss),
        backward=backward,
        seeds=_seeds(len(batches)),
        randomness=(_save_randomness, _restore_randomness),
    )
    set_random_state(before)  # the seeds were for this step only
    if config.finalize_model_grads_func is not None:
        groups = {} if pg_collection is None else {"pg_collection": pg_collection}
        forced = {"force_all_reduce": True} if force_all_reduce else {}
        num_tokens = torch.ones_like(output.loss, dtype=torch.int32) if config.calculate_per_token_loss else None
        config.finalize_model_grads_func([module], num_tokens, **groups, **forced)
    return [report(output.loss)]


def _first(one_or_several: Any) -> Any:
    return one_or_several[0] if isinstance(one_or_several, (list, tuple)) else one_or_several


def _seeds(micro_batches: int) -> list[int]:
    """Return one seed per micro-batch, equal on tensor-parallel ranks. They depend on the iteration, so runs resume."""
    from megatron.training import get_args

    args, rank = get_args(), parallel_state.get_data_parallel_rank()
    return [micro_batch_seed(args.seed, args.curr_iteration, index, rank) for index in range(micro_batches)]


def _encode(step: ContrastiveStep, model: nn.Module, config: Any, batch: Any) -> Features:
    with torch.autocast("cuda", config.autocast_dtype) if config.enable_autocast else contextlib.nullcontext():
        features = step.encode(model, batch)
    return {name: value.float() for name, value in features.items()}


def _save_randomness() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the states of torch's and of Megatron's own generators (dropout in sharded layers)."""
    found = get_cuda_rng_tracker().get_states().items()  # Transformer Engine's tracker holds generators, not states
    own = {name: state.get_state() if isinstance(state, torch.Generator) else state for name, state in found}
    return random_state(), own


def _restore_randomness(states: tuple[Any, dict[str, torch.Tensor]]) -> None:
    set_random_state(states[0])
    tracker = get_cuda_rng_tracker()
    held = tracker.get_states()
    for name, state in states[1].items():
        if isinstance(held[name], torch.Generator):
            held[name].set_state(state)
        else:
            held[name] = state
    tracker.set_states(held)
