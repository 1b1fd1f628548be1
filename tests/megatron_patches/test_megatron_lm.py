"""The loss in Megatron-LM's loop: its training package is stubbed, all that it calls is megatron-core's own."""

import argparse
import contextlib
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lib.megatron_stub import stub_training_package
from tests.lib.ranks import rejected, run_ranks
from tests.lib.shown_commands import python_blocks
from tests.lib.step_oracle import ToyCLIP, global_batch, whole_batch_gradients, worst_error
from tests.lib.tensor_parallel import layout

MICRO_BATCHES, MICRO_BATCH_SIZE = 3, 4


def get_batch(data_iterator):
    return next(data_iterator)


def encode(model, batch):
    return model(*batch)


@contextlib.contextmanager
def without_cuda():
    """megatron-core makes some tensors on the GPU by name; here there is none, whatever the host has."""
    zeros = torch.zeros

    def on_cpu(*shape, device=None, **options):
        return zeros(*shape, **options)

    no_gpu = {"current_device": lambda: "cpu", "is_available": lambda: False}
    with mock.patch.multiple(torch.cuda, **no_gpu), mock.patch.object(torch, "zeros", on_cpu):
        yield


def megatron_model(config, events):
    """ToyCLIP as Megatron's training package would make it; `events` are what is asked of it, in order."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.transformer import MegatronModule, TransformerConfig

    class Model(MegatronModule):
        def __init__(self):
            super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **config))
            self.towers, self.model_type = ToyCLIP(), ModelType.encoder_or_decoder

        def forward(self, *batch):
            events.append("forward" if torch.is_grad_enabled() else "forward without graph")
            return self.towers(*batch)

        def set_input_tensor(self, tensor):
            """There is no pipeline."""

    class DataParallel(DistributedDataParallel):
        def set_is_first_microbatch(self):
            events.append("first micro-batch")

        def finish_grad_sync(self, **options):
            events.append("finish")
            super().finish_grad_sync(**options)

    buckets = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=100)
    model = Model()
    parallel = DataParallel(model.config, buckets, model)
    model.config.no_sync_func, model.config.finalize_model_grads_func = parallel.no_sync, finalize_model_grads
    return parallel


def train_step(
    rank,
    world_size,
    size,
    shared,
    forward_only=False,
    config=types.MappingProxyType({}),
    encode=encode,
    iterations=range(1),
    force_all_reduce=False,
    **groups,
):
    """Steps of Megatron's loop -> (loss as it logs it, gradients that it hands the optimizer, events)."""
    from megatron.core import parallel_state

    from megatron_patches.megatron_lm import ContrastiveStep, share_one_loss

    parallel = layout(size)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    training, events = stub_training_package(), []
    for _ in range(2 * shared):
        share_one_loss()
    own = MICRO_BATCHES * MICRO_BATCH_SIZE
    sides = [side[parallel.dp_rank * own :][:own] for side in global_batch(parallel.dp_size * own)]
    with without_cuda():
        model, step = megatron_model(config, events), ContrastiveStep(get_batch, encode)
        for iteration in iterations:
            sys.modules["megatron.training"].args.curr_iteration = iteration
            reports = training.get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=zip(*(side.split(MICRO_BATCH_SIZE) for side in sides)),
                model=[model],
                num_microbatches=MICRO_BATCHES,
                seq_length=1,
                micro_batch_size=MICRO_BATCH_SIZE,
                decoder_seq_length=None,
                forward_only=forward_only,
                adjust_tensor_shapes_fn=None,
                force_all_reduce=force_all_reduce,
                **groups,
            )
    gradients = {name: p.main_grad.clone() for name, p in model.module.towers.named_parameters()}
    total = torch.vstack([report["contrastive loss"].view(-1) for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=parallel.dp_group)
    return float(total[0] / total[1]), gradients, events


def reference(copies: int, shared: bool):
    """The loss of the whole global batch; or the mean of the losses of each micro-batch over all ranks."""
    sides = [side.double().view(copies, MICRO_BATCHES, MICRO_BATCH_SIZE, -1) for side in global_batch(
        copies * MICRO_BATCHES * MICRO_BATCH_SIZE
    )]  # fmt: skip
    parts = [[side[:, i].flatten(0, 1) for side in sides] for i in range(MICRO_BATCHES)]
    batches = [[side.flatten(0, 2) for side in sides]] if shared else parts
    model = ToyCLIP().double()
    losses, gradients = zip(*(whole_batch_gradients(model, [batch], [0]) for batch in batches))
    mean = {name: sum(one[name] for one in gradients) / len(batches) for name in gradients[0]}
    return float(sum(losses)) / len(batches), mean


def times_1024(loss):
    return loss * 1024


MEAN, PER_TOKEN, SCALED = {}, {"calculate_per_token_loss": True}, {"grad_scale_func": times_1024}
CASES = [
    (1, 2, False, MEAN),
    (1, 2, False, PER_TOKEN),
    (1, 2, True, PER_TOKEN),
    (1, 2, True, SCALED),
    (2, 1, True, MEAN),
    (2, 2, True, PER_TOKEN),
]


@pytest.mark.first(3)
@pytest.mark.parametrize(("size", "copies", "shared", "config"), CASES)
def test_gradients_are_those_of_the_global_loss(size, copies, shared, config):
    """Times the loss scale of Megatron's optimizer, which divides by it."""
    expected_loss, expected = reference(copies, shared)
    factor = 1024 if config is SCALED else 1
    for loss, gradients, events in run_ranks(train_step, size * copies, size, shared, config=config):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert worst_error({name: gradient / factor for name, gradient in gradients.items()}, expected) < 1e-5
        assert events.count("first micro-batch") == 1 and events[-1] == "finish"
        if shared:
            cached = MICRO_BATCHES - 1
            first_pass = ["forward without graph"] * cached + ["forward"]
            assert events == ["first micro-batch", *first_pass, *["forward"] * cached, "finish"]


def finalised_with(rank, world_size, **given):
    """What the function of the model's config that finalises gradients is called with, in addition to the model."""
    with mock.patch("megatron.core.distributed.finalize_model_grads") as finalise:
        train_step(rank, world_size, 1, True, **given)
    (call,) = finalise.call_args_list
    return call.args[1:], call.kwargs


@pytest.mark.parametrize("given", [{"pg_collection": "groups"}, {"force_all_reduce": True}, {}])
def test_gradients_are_finalised_over_the_groups_that_megatrons_loop_names(given):
    """As Megatron's own schedule hands them on."""
    assert run_ranks(finalised_with, 1, **given) == [((None,), given)]


def test_an_evaluation_step_takes_one_loss_without_gradients():
    loss, gradients, events = run_ranks(train_step, 2, 1, True, forward_only=True)[0]
    assert loss == pytest.approx(reference(2, True)[0], rel=1e-5) and not any(one.any() for one in gradients.values())
    assert events == ["first micro-batch"] + ["forward without graph"] * MICRO_BATCHES


def draws(rank, world_size, iterations, seed):
    """What torch's random numbers are in each encoding of these iterations of one process, [iterations, encodings]."""
    drawn = []

    def encode_and_draw(model, batch):
        drawn.append(torch.rand(1).item())
        return model(*batch)

    torch.manual_seed(seed)
    train_step(rank, world_size, 1, True, encode=encode_and_draw, iterations=iterations)
    return torch.tensor(drawn).view(len(iterations), -1).tolist()


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws():
    """Seeds follow from what Megatron's checkpoints bring back, whatever else has seeded torch."""
    whole, resumed = run_ranks(draws, 2, range(5), 0), run_ranks(draws, 2, range(3, 5), 1)
    for before, after in zip(whole, resumed):
        assert before[3:] == after
    different = {value for rank in whole for iteration in rank for value in iteration}
    assert len(different) == 2 * 5 * MICRO_BATCHES, "ranks x iterations x micro-batches; the second pass repeats them"


def draws_of_megatrons_generators(rank, world_size, graph_safe):
    """What layers draw in each encoding of two iterations from Megatron's tracker, whose states are tensors, or, with
    Transformer Engine's or one for CUDA graphs, generators."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker, generator, drawn = CudaRNGStatesTracker(), torch.Generator().manual_seed(1), []
    tracker.set_states({"model-parallel-rng": generator if graph_safe else generator.get_state()})

    def encode_and_draw(model, batch):  # as in the tracker's fork
        state = tracker.states_["model-parallel-rng"]
        forked = state if graph_safe else torch.Generator()
        if not graph_safe:
            forked.set_state(state)
        drawn.append(torch.rand(1, generator=forked).item())
        tracker.states_["model-parallel-rng"] = forked if graph_safe else forked.get_state()
        return model(*batch)

    with mock.patch("megatron_patches.megatron_lm.get_cuda_rng_tracker", lambda: tracker):
        train_step(rank, world_size, 1, True, encode=encode_and_draw, iterations=range(2))
    return drawn


@pytest.mark.parametrize("graph_safe", [False, True])
def test_split_layers_draw_the_same_twice_and_then_go_on(graph_safe):
    cached = MICRO_BATCHES - 1
    generator, expected = torch.Generator().manual_seed(1), []
    for _ in range(2):
        first_pass = [torch.rand(1, generator=generator).item() for _ in range(MICRO_BATCHES)]
        expected += first_pass + first_pass[:cached]
    assert run_ranks(draws_of_megatrons_generators, 1, graph_safe)[0] == expected


def rejection(rank, world_size, config):
    return rejected(train_step, rank, world_size, 1, True, config=config)


@pytest.mark.parametrize("config", [{"num_moe_experts": 4}, {"mtp_num_layers": 1}, {"cuda_graph_impl": "local"}])
def test_what_only_megatrons_schedule_does_is_rejected(config):
    ((name, value),) = config.items()
    assert f"{name} {value} is for Megatron's own schedule" in run_ranks(rejection, 1, config)[0]


def test_an_unknown_loss_is_rejected_when_the_step_is_made():
    from megatron_patches.megatron_lm import ContrastiveStep

    with pytest.raises(ValueError, match="unknown loss 'infcl'; one of .*inf_cl"):
        ContrastiveStep(get_batch, encode, name="infcl")
    with pytest.raises(TypeError, match="tiles"):
        ContrastiveStep(get_batch, encode, tiles="torch")


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


def test_the_documented_megatron_loop_runs(monkeypatch):
    for module in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, module, None)
    stub_training_package()
    import megatron.training.training as loop

    plain, started = loop.get_forward_backward_func, []
    names = {"get_batch": get_batch, "encode": encode, "pretrain": lambda *arguments: started.append(arguments)}
    names |= dict.fromkeys(("datasets_provider", "model_provider"))
    names["ModelType"] = argparse.Namespace(encoder_or_decoder=None)
    exec(python_blocks()["docs/howto/tensor-parallel.md 0"], names)
    assert started[0][-1] is names["step"] and loop.get_forward_backward_func is not plain
