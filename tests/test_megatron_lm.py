"""The loss in Megatron-LM's loop: its training package is stubbed, megatron-core's own functions take the loss."""

import contextlib
import sys
import types

import pytest
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from tests.step_oracle import ToyCLIP, dense_loss, global_batch
from tests.tensor_parallel import layout

MICRO_BATCHES, MICRO_BATCH_SIZE = 3, 4


def get_batch(data_iterator):
    return next(data_iterator)


def encode(model, batch):
    return model(*batch)


def schedule_of_megatron(
    *,
    forward_step_func,
    data_iterator,
    model,
    num_microbatches,
    forward_only=False,
    collect_non_loss_data=False,
    **given,
):
    """What forward_backward_no_pipelining does, which itself needs a GPU; the loss is taken by megatron-core."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    reports = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, _ = forward_step_calc_loss(
            model, output, loss_func, model.config, None, False, num_microbatches, reports,
            cp_group_size=1, is_last_stage=True,
        )  # fmt: skip
        if not forward_only:
            loss.backward()
    if not forward_only and model.config.finalize_model_grads_func is not None:
        model.config.finalize_model_grads_func([model], None)
    return reports


def get_forward_backward_func(pp_size=None, vp_size=None):
    return schedule_of_megatron


def stub_training_package(function=get_forward_backward_func):
    training = types.ModuleType("megatron.training.training")
    training.get_forward_backward_func = function
    sys.modules["megatron.training"] = types.ModuleType("megatron.training")
    sys.modules["megatron.training.training"] = training
    return training


class Events(list):
    """The order in which a model's gradients are synchronised and finalised."""

    def no_sync(self):
        self.append("no_sync")
        return contextlib.nullcontext()

    def finalize(self, models, num_tokens, **given):
        assert all(isinstance(model, nn.Module) for model in models)
        self.append("finalize")


def train_step(rank, world_size, size, shared, name, forward_only=False):
    """One step of Megatron's loop -> (reports, gradients averaged over data-parallel ranks, events, patch outcomes)."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    from megatron_patches.megatron_lm import ContrastiveStep, share_one_loss

    parallel = layout(size)
    if size == 1:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    training, model, events = stub_training_package(), ToyCLIP(), Events()
    outcomes = [share_one_loss(), share_one_loss()] if shared else []
    model.config = ModelParallelConfig()
    model.config.finalize_model_grads_func, model.config.no_sync_func = events.finalize, events.no_sync
    step = ContrastiveStep(get_batch, encode, name=name)
    own = MICRO_BATCHES * MICRO_BATCH_SIZE
    sides = [side[parallel.dp_rank * own :][:own] for side in global_batch(parallel.dp_size * own)]
    reports = training.get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=zip(*(side.split(MICRO_BATCH_SIZE) for side in sides)),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=1,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=forward_only,
    ) if shared else schedule_of_megatron(
        forward_step_func=step,
        data_iterator=zip(*(side.split(MICRO_BATCH_SIZE) for side in sides)),
        model=model,
        num_microbatches=MICRO_BATCHES,
    )  # fmt: skip
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():  # what Megatron's DistributedDataParallel does
        dist.all_reduce(gradient, group=parallel.dp_group)
        gradient /= parallel.dp_size
    total = sum(report["contrastive loss"] for report in reports)
    dist.all_reduce(total, group=parallel.dp_group)  # what its training_log does
    return float(total[0] / total[1]), gradients, list(events), outcomes


def truth(copies: int, shared: bool):
    """The loss of the whole global batch; or the mean of the losses of each micro-batch over all ranks."""
    model = ToyCLIP().double()
    images, texts = (side.double().view(copies, MICRO_BATCHES, MICRO_BATCH_SIZE, -1) for side in global_batch(
        copies * MICRO_BATCHES * MICRO_BATCH_SIZE
    ))  # fmt: skip

    def loss(images, texts):
        features = [
            nn.functional.normalize(tower(x), dim=-1) for tower, x in ((model.image, images), (model.text, texts))
        ]
        return dense_loss(*features, model.logit_scale.exp())

    if shared:
        value = loss(images.flatten(0, 2), texts.flatten(0, 2))
    else:
        chunks = [loss(images[:, i].flatten(0, 1), texts[:, i].flatten(0, 1)) for i in range(MICRO_BATCHES)]
        value = sum(chunks) / MICRO_BATCHES
    value.backward()
    return value.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("size", "copies", "shared"),
    [(1, 2, False), (2, 1, True), (2, 2, True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1, True), (1, 2, True), (2, 2, False)]],
)
def test_gradients_are_those_of_the_global_loss(size, copies, shared):
    expected_loss, expected = truth(copies, shared)
    for loss, gradients, events, outcomes in run_ranks(train_step, size * copies, size, shared, "inf_cl"):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            assert float((gradient.double() - expected[name]).norm() / expected[name].norm()) < 1e-5, name
        if shared:
            assert events == ["no_sync"] * (MICRO_BATCHES - 1) + ["finalize"]
            assert outcomes == ["applied", "already applied"]


def test_an_evaluation_step_takes_one_loss_without_gradients():
    loss, gradients, events, _ = run_ranks(train_step, 2, 1, True, "inf_cl", True)[0]
    assert loss == pytest.approx(truth(2, True)[0], rel=1e-5) and gradients == {} and events == []


def test_other_steps_go_through_megatrons_schedule(monkeypatch):
    from megatron_patches.megatron_lm import share_one_loss

    for name in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, None)
    training = stub_training_package()
    training.get_forward_backward_func = _recording
    share_one_loss()
    assert training.get_forward_backward_func()(forward_step_func=print, model=1) == {
        "forward_step_func": print, "collect_non_loss_data": False, "model": 1
    }  # fmt: skip


def _recording(pp_size=None, vp_size=None):
    return lambda **given: given


def test_without_megatron_lm_the_expected_path_is_named(monkeypatch):
    from megatron_patches.megatron_lm import share_one_loss

    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(RuntimeError, match="no megatron.training.training.get_forward_backward_func"):
        share_one_loss()
