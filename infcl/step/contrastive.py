"""One contrastive step for any encoders: one loss over all ranks' micro-batches, activations of one in memory.

    model = DistributedDataParallel(Encoders(query_encoder, document_encoder))
    loss = partial(inf_cl_loss, group=dist.group.WORLD)
    for queries, documents in loader:
        value = contrastive_step(model, split_batch((queries, documents), 32), loss)
        optimizer.step()
        optimizer.zero_grad()

The gradient cache (`infcl.step.grad_cache`) encodes every micro-batch without a graph, computes the loss, and encodes
again with a graph. Both passes draw the same random numbers, so dropout is exact. BatchNorm normalises with the
statistics of a micro-batch, as under gradient accumulation; its running statistics are updated once per step.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infcl.step import wrappers
from infcl.step.grad_cache import Features, MicroBatches, cached_step, call
from infcl.step.replay import Replay


def contrastive_step(
    model: nn.Module,
    micro_batches: MicroBatches,
    loss: Callable[..., Tensor],
    *,
    cached_activations: int = 1,
    backward: Callable[[Tensor], object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Add the gradient of the loss of all ranks' micro-batches to the parameters' `.grad`. Collective.

    Args:
        model: a plain module, a module that is or contains DistributedDataParallel or fully_shard modules, or a
            DeepSpeed engine of ZeRO 0-3. The step calls `model(*m)` for a tuple micro-batch, `model(**m)` for a
            mapping, else `model(m)`. The model returns a tuple or mapping of features [rows, D] and scalars (0-dim or
            [1], such as the logit scale).
        micro_batches: micro-batches of any sizes, the same number on every rank; from `split_batch` or your own.
        loss: called once, with the features of all micro-batches of this rank and the scalars: by position if the
            model returns a tuple, by name if a mapping. The mean over ranks of the loss and of its gradients must be
            the global loss and its gradient, as for every loss of infcl.
        cached_activations: number of micro-batches that are encoded only once, and keep their activations until the
            loss is known; under DistributedDataParallel at most all but one.
        backward: replaces `surrogate.backward()`, for example `lambda s: scaler.scale(s).backward()`.
        group: ranks that average the gradients of parameters outside of any wrapper.

    Returns:
        This rank's loss, 0-dim, detached.

    Raises:
        ValueError: no parameter requires a gradient; the model returns anything else; a forward changes a buffer that
            is not a running statistic of BatchNorm; pass 2 gives different features than pass 1; nothing averages the
            gradients over the ranks.

    Source: GradCache, arXiv 2101.06983.
    """
    total, name = len(micro_batches), type(getattr(model, "module", model)).__name__
    if total == 0:
        raise ValueError("contrastive_step needs at least one micro-batch")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"no parameter of {name} requires a gradient: there is nothing to train")
    if wrappers.is_ddp(model):  # DDP decides in the forward whether its backward reduces
        cached_activations = min(cached_activations, max(1, total - 1))
    names: list[str] = []  # names of the model's outputs; empty for a tuple
    graphs = 0
    replay = Replay(model, name, total)
    with replay, ExitStack() as without_reduction:
        without_reduction.enter_context(wrappers.accumulating(model))

        def encode(*inputs: Any, **named: Any) -> Features:
            nonlocal graphs
            replay.begin()
            graphs += torch.is_grad_enabled()
            if graphs == total and (total == 1 or cached_activations < total):  # the next backward is the last
                without_reduction.close()
            with _note(f"{name}, micro-batch {replay.index} of {total}, contrastive_step"):
                output = model(*inputs, **named)
            if isinstance(output, Mapping):
                names[:] = output
                output = tuple(output.values())
            features = _check_output(name, (output,) if isinstance(output, Tensor) else output)
            replay.compare(features)
            return features

        def compute_loss(values: Features) -> Tensor:
            given = dict(zip(names or values, values.values()))
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in given.items())
            with _note(f"the loss of {name}'s outputs {shapes}, contrastive_step"):
                return loss(**given) if names else loss(*given.values())

        def run_backward(surrogate: Tensor, is_last: bool) -> None:
            if is_last:
                without_reduction.close()
            (backward or wrappers.backward_of(model))(surrogate)

        output = cached_step(
            micro_batches,
            encode=encode,
            loss=compute_loss,
            backward=run_backward,
            on_phase=replay.statistics.on_phase,
            resident=cached_activations,
        )
    wrappers.average_unwrapped(model, group)
    replay.check()
    return output.loss


class Encoders(nn.Module):
    """One encoder per input, or one for all inputs, in a single module for wrappers and `contrastive_step`.

    `forward(*inputs)` returns a tuple: the features [rows, D] of each input, then logit_scale [1] (multiplicative) and
    logit_bias [1], if they exist. A tuple or mapping input is unpacked into its encoder's arguments.

    Args:
        encoders: modules. A single one encodes every input.
        features: function of an encoder's output and its input that returns [rows, D]; None if the output is [rows, D].
        normalize: scale the features to unit length, in float32 or wider.
        logit_scale, logit_bias: initial values of the two parameters; the scale is stored as its logarithm. None
            creates no such parameter, for a loss with a fixed scale.
    """

    def __init__(
        self,
        *encoders: nn.Module,
        features: Callable[[Any, Any], Tensor] | None = None,
        normalize: bool = True,
        logit_scale: float | None = 1 / 0.07,
        logit_bias: float | None = None,
    ):
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.features, self.normalize = features, normalize
        self.logit_scale = None if logit_scale is None else nn.Parameter(torch.tensor([math.log(logit_scale)]))
        self.logit_bias = None if logit_bias is None else nn.Parameter(torch.tensor([logit_bias]))

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        encoders = list(self.encoders) * (len(inputs) if len(self.encoders) == 1 else 1)
        if len(encoders) != len(inputs):
            hint = "; a list is one input, a tuple is several" if isinstance(inputs[0], list) else ""
            raise ValueError(f"{len(inputs)} inputs for {len(encoders)} encoders{hint}")
        outputs = [self._encode(*both, index) for index, both in enumerate(zip(encoders, inputs))]
        if len({output.shape[1] for output in outputs}) > 1:
            shapes = (f"encoder {i} ({type(encoders[i]).__name__}) {list(o.shape)}" for i, o in enumerate(outputs))
            raise ValueError(f"features of different widths: {', '.join(shapes)}; project them to one width")
        if self.logit_scale is not None:
            outputs.append(_at_least_float32(self.logit_scale).exp())
        if self.logit_bias is not None:
            # + 0 makes a copy: ZeRO-3 frees the parameter after the forward
            outputs.append(_at_least_float32(self.logit_bias) + 0)
        return tuple(outputs)

    def _encode(self, encoder: nn.Module, given: Any, index: int) -> Tensor:
        name = f"encoder {index} ({type(encoder).__name__})"
        with _note(name):
            output = call(encoder, given)
            if self.features is not None:
                output = self.features(output, given)
        if not isinstance(output, Tensor) or output.ndim != 2 or not output.is_floating_point():
            raise ValueError(f"{name} gives {_describe(output)}; `features=` must turn it into floats [rows, D]")
        return F.normalize(_at_least_float32(output), dim=-1) if self.normalize else output


def split_batch(batch: Any, size: int) -> list[Any]:
    """Split a batch into micro-batches of `size` rows; the last one may be smaller.

    Args:
        batch: tensors and arrays [rows, ...], and lists or tuples of `rows` entries (strings, objects; in lists also
            tensors and lists), in nested tuples, named tuples, lists and mappings, as `default_collate` gives them.
            Other objects, numbers, strings, None and 0-dim tensors are copied to every micro-batch.
        size: rows per micro-batch.

    Returns:
        Micro-batches of the same structure. A list of inputs becomes a tuple, which `contrastive_step` unpacks; a tuple
        of strings becomes a list, which is one input.

    Raises:
        ValueError: no tensor or list has rows, they have different numbers of rows, or several numbers are possible.
    """
    counts = list(dict.fromkeys(_counts(batch)))
    fitting = [count for count in counts if _fits(batch, count, outermost=True)]
    if not counts:
        raise ValueError(f"no tensor with rows in {_describe(batch)}")
    if len(fitting) > 1:
        raise ValueError(
            f"{_describe(batch)} may have {' or '.join(map(str, fitting))} rows; make its micro-batches yourself, or "
            "give the inputs of an encoder as a tuple"
        )
    rows = fitting[0] if fitting else counts[0]
    micro_batches = [_slice(batch, slice(begin, begin + size), rows) for begin in range(0, rows, size)]
    unpacked = isinstance(batch, list) and _is_nested(batch)
    return [tuple(micro_batch) for micro_batch in micro_batches] if unpacked else micro_batches


def _check_output(name: str, output: Any) -> Features:
    if not isinstance(output, (tuple, list)) or not output:
        raise ValueError(f"{name} returns {_describe(output)}, not a tuple or mapping of tensors")
    for index, value in enumerate(output):
        if not isinstance(value, Tensor) or not value.is_floating_point() or (value.ndim < 2 and value.numel() != 1):
            raise ValueError(f"{name}: output {index} is {_describe(value)}; features are [rows, D], scalars [1]")
    if all(value.ndim < 2 for value in output):
        raise ValueError(f"{name} returns no features [rows, D], only {_describe(output[0])}")
    # copy scalars: one may be the parameter itself, whose memory FSDP2 frees in a backward
    return {str(index): value if value.ndim > 1 else value + 0 for index, value in enumerate(output)}


def _at_least_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if _is_array(value):
        return f"{type(value).__name__} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        more = f", ... {len(value)} in all" if len(value) > 3 else ""
        return f"{type(value).__name__}({', '.join(map(_describe, value[:3]))}{more})"
    return f"{type(value).__name__}({', '.join(map(str, value))})" if isinstance(value, Mapping) else repr(value)[:80]


@contextmanager
def _note(where: str) -> Iterator[None]:
    """Add a note with the location to an exception raised inside."""
    try:
        yield
    except Exception as error:
        if sys.version_info >= (3, 11):
            error.add_note(f"in {where}")
        raise


def _is_array(value: Any) -> bool:
    return hasattr(value, "ndim") and hasattr(value, "shape")


def _is_nested(sequence: Any) -> bool:
    """Return whether a sequence holds inputs, or is a named tuple of them, rather than a row in each entry."""
    kinds = (Mapping, tuple, list)
    return hasattr(sequence, "_fields") or any(_is_array(value) or isinstance(value, kinds) for value in sequence)


def _counts(batch: Any, *, outermost: bool = True) -> Iterator[int]:
    """Yield the numbers of rows that the parts of a batch may have."""
    if _is_array(batch):
        yield from batch.shape[:1]
    elif isinstance(batch, (Mapping, tuple, list)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _counts(part, outermost=False)
        if isinstance(batch, (tuple, list)) and batch and not (_is_nested(batch) and outermost):
            yield len(batch)


def _fits(batch: Any, count: int, *, outermost: bool = False) -> bool:
    try:
        _slice(batch, slice(0, 1), count, outermost=outermost)
    except ValueError:
        return False
    return True


def _slice(batch: Any, rows: slice, total: int, *, outermost: bool = True) -> Any:
    """Return these rows of a batch. Raise ValueError if a part of it has not `total` rows."""

    def wrong() -> ValueError:
        return ValueError(f"{_describe(batch)} in a batch of {total} rows; make its micro-batches yourself")

    if _is_array(batch):
        if batch.ndim and len(batch) != total:
            raise wrong()
        return batch[rows] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _slice(value, rows, total, outermost=False) for key, value in batch.items()}
    if not isinstance(batch, (tuple, list)) or not batch:
        return batch
    if not _is_nested(batch):
        if len(batch) != total:
            raise wrong()
        return list(batch[rows])
    if isinstance(batch, list) and len(batch) == total and not outermost:
        if any(True for value in batch for _ in _counts(value)) and all(_fits(value, total) for value in batch):
            raise wrong()  # it may hold `total` inputs, or a row in each entry
        return batch[rows]
    parts = [_slice(value, rows, total, outermost=False) for value in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
