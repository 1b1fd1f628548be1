"""A parameter that only some micro-batches of a step use has the gradient of those, under every ZeRO stage."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infcl import contrastive_step, inf_cl_loss
from infcl.engine.engine import _import_deepspeed
from infcl.parallel import Parallel
from tests.lib.engine_steps import accumulate, engine_on_cpu
from tests.lib.ranks import rejected, run_ranks
from tests.lib.step_oracle import LR, adamw, dense_loss, worst_error


class Mixed(nn.Module):
    """A side whose last layer only some micro-batches use: an optional modality, an expert."""

    def __init__(self, empty: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.documents, self.extra = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 5)
        self.logit_scale = nn.Parameter(torch.tensor([2.0]))
        if empty:
            self.empty = nn.Parameter(torch.zeros(0, 5))

    def forward(self, queries, documents, uses_extra):
        queries = torch.tanh(self.queries(queries))
        if uses_extra:
            queries = queries + self.extra(queries)
        return F.normalize(queries, dim=-1), F.normalize(self.documents(documents), dim=-1), self.logit_scale.exp()


PATTERNS = ((1, 1, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0), (0, 1, 0), (1, 0, 1))  # of micro-batches, per step


def mixed_batches(step: int, rank: int, pattern):
    generator = torch.Generator().manual_seed(100 * step + rank)
    sides = [torch.randn(2, 4, 6, generator=generator) for _ in pattern]
    return [(*both, uses_extra) for both, uses_extra in zip(sides, pattern)]


def mixed_engine(options: str, **model):
    """options: "zero<stage>" and any of "overlap" and "offload"."""
    zero = {"stage": int(options[4]), "stage3_param_persistence_threshold": 0, "overlap_comm": "overlap" in options}
    if "offload" in options:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    module = Mixed(**model)
    optimizer = adamw([{"params": list(module.parameters()), "weight_decay": 0.0}])
    return _import_deepspeed().initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


def trainers_engine(options: str):
    """As on several hosts where it overlaps."""
    preset = f"{options[:5]}_offload" if "offload" in options else options[:5]
    with mock.patch.object(Parallel, "hosts", 2 if "overlap" in options else 1):
        engine = engine_on_cpu(Mixed(), preset, len(PATTERNS[0]), grad_clip_norm=None, wd=0.0)
    assert "overlap" not in options or engine.engine.optimizer.overlap_comm
    return engine


def mixed_steps(rank: int, world_size: int, options: str, cached_activations: int):
    """(losses, norms of the gradients if the trainer's engine measured them, weights)"""
    trainers = trainers_engine(options) if "trainer's" in options else None
    engine, losses, norms = trainers.engine if trainers else mixed_engine(options), [], []

    def encode(queries, documents, uses_extra):
        queries, documents, scale = engine(queries, documents, uses_extra)
        return {"image_features": queries, "text_features": documents, "logit_scale": scale.log()}

    for step, pattern in enumerate(PATTERNS):
        batches = mixed_batches(step, rank, pattern)
        if trainers:
            value = accumulate(trainers, batches, [0] * len(batches), encode=encode, resident=cached_activations).loss
            trainers.step(LR)
            norms.append(float(trainers.norms[2]))
        else:
            loss = partial(inf_cl_loss, group=dist.group.WORLD)
            value = contrastive_step(engine, batches, loss, cached_activations=cached_activations)
            engine.step()
        dist.all_reduce(value)
        losses.append(float(value) / world_size)
    with _import_deepspeed().zero.GatheredParameters(list(engine.module.parameters())):
        return losses, norms, {key: value.detach().float().clone() for key, value in engine.module.state_dict().items()}


def mixed_steps_in_float64(world_size: int):
    model, losses, norms = Mixed().double(), [], []
    optimizer = adamw([{"params": list(model.parameters()), "weight_decay": 0.0}])
    for step, pattern in enumerate(PATTERNS):
        batches = [batch for rank in range(world_size) for batch in mixed_batches(step, rank, pattern)]
        outputs = [model(queries.double(), documents.double(), uses) for queries, documents, uses in batches]
        queries, documents, scales = zip(*outputs)
        loss = dense_loss(torch.cat(queries), torch.cat(documents), scales[0])
        optimizer.zero_grad()
        (loss + 0 * model.extra.weight.sum() + 0 * model.extra.bias.sum()).backward()  # unused: 0, not None
        norms.append(float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {key: value.detach().float() for key, value in model.state_dict().items()}


@pytest.mark.first(9)
@pytest.mark.parametrize(
    ("options", "world_size", "cached_activations"),
    [
        ("zero1 overlap", 2, 1),
        ("zero2 offload", 2, 1),
        ("zero3", 2, 2),
        *((f"zero{stage} of the trainer's engine", 2, 1) for stage in range(4)),
        *((f"zero{stage} overlap of the trainer's engine", 2, 1) for stage in (1, 2)),
        ("zero0", 2, 1),
        ("zero3 offload of the trainer's engine", 2, 2),
        ("zero1 offload", 1, 2),
        ("zero2", 2, 2),
        ("zero3 offload", 2, 1),
    ],
)
def test_a_parameter_that_some_micro_batches_use_has_the_gradient_of_those(options, world_size, cached_activations):
    """Left to itself stage 1 steps with one rank's gradient where the last backward of a step does not reach a
    parameter; stage 3 applies that of an earlier step again, or adds it; offloaded state does so and drops one too."""
    losses, norms, state = run_ranks(mixed_steps, world_size, options, cached_activations)[0]
    expected_losses, expected_norms, expected = mixed_steps_in_float64(world_size)
    assert losses == pytest.approx(expected_losses, abs=5e-6)
    assert norms == pytest.approx(expected_norms if "trainer's" in options else [], rel=1e-5)
    assert worst_error(state, expected) < 1e-6


def step_that_is_rejected(rank: int, world_size: int, kind: str):
    loss = partial(inf_cl_loss, group=dist.group.WORLD)
    empty = kind == "zero3"
    pattern = (1, 0, 0) if rank == 0 and not empty else (0, 1, 0)
    if kind == "no wrapper":
        model = Mixed()
    elif kind == "static graph":
        model = nn.parallel.DistributedDataParallel(Mixed(), static_graph=True)
    else:
        model = mixed_engine(kind, empty=empty)
    return rejected(contrastive_step, model, mixed_batches(0, rank, pattern), loss)


@pytest.mark.parametrize(
    ("kind", "world_size", "message"),
    [
        ("zero2", 2, "must use the same parameters on all ranks"),
        ("zero2 overlap offload", 2, "must use the same parameters on all ranks"),
        ("zero3", 2, "empty: no elements, which ZeRO-3 cannot gather"),
        ("static graph", 1, "static_graph"),
        ("no wrapper", 2, "no wrapper averages the gradients of logit_scale and 6 more parameters"),
    ],
)
def test_steps_that_wrappers_cannot_make_are_rejected_on_all_ranks(kind, world_size, message):
    for rejection in run_ranks(step_that_is_rejected, world_size, kind):
        assert message in rejection
