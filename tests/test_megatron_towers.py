"""Towers in parts equal the whole ones: state dict, features, gradients; what must not be split stays equal."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infcl.towers import CLIP
from tests.ranks import run_ranks
from tests.tensor_parallel import CFG, global_batch, layout, new_model


def whole_values(model, part_of=lambda parameter: parameter.detach()) -> dict[str, torch.Tensor]:
    values = {}
    for name, parameter in model.named_parameters():
        split = getattr(parameter, "tensor_parallel_split", None)
        values[name] = part_of(parameter) if split is None else split.whole(part_of(parameter))
    return values


def split_and_back(rank, world_size):
    """-> (names that differ from the whole model after split and gather, elements that this rank holds)."""
    from megatron_patches.towers import split_towers

    whole = new_model()
    model = new_model()
    split_towers(model, layout(world_size).tp_group)
    assert list(model.state_dict()) == list(whole.state_dict())
    gathered = whole_values(model)
    differ = [name for name, value in whole.state_dict().items() if not torch.equal(gathered[name], value)]
    return differ, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_model_gathers_to_the_state_dict_it_came_from(size):
    whole = sum(p.numel() for p in CLIP(CFG).parameters())
    for differ, held in run_ranks(split_and_back, size):
        assert differ == []
        blocks = sum(p.numel() for n, p in CLIP(CFG).named_parameters() if "resblocks" in n and "ln_" not in n)
        assert held < whole - 0.95 * blocks * (1 - 1 / size)


def forward_backward(rank, world_size, size, sequence_parallel, checkpointing, rows):
    """float64 gradients of a fixed surrogate -> (features, whole gradients)."""
    from megatron_patches.towers import split_towers

    model = new_model(activation_checkpointing=checkpointing).double()
    if size > 1:
        split_towers(model, layout(size).tp_group, sequence_parallel=sequence_parallel)
    images, texts = global_batch(rows, seed=5)
    features = model.visual(images.double()), model.encode_text(texts)
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(f.shape, generator=generator, dtype=f.dtype) for f in features]
    # expand: a gradient that is not contiguous must be summed over the ranks all the same
    (sum((f * w).sum() for f, w in zip(features, weights)) + model.logit_scale.expand(3).sum()).backward()
    return [f.detach() for f in features], whole_values(model, lambda parameter: parameter.grad)


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "checkpointing", "rows"),
    [(2, False, False, 3), (4, False, True, 5), (2, True, False, 4), (2, True, True, 5), (4, True, False, 3)],
)
def test_features_and_gradients_equal_the_whole_models(size, sequence_parallel, checkpointing, rows):
    """Also where the samples do not divide by T under sequence parallelism."""
    features, gradients = forward_backward(0, 1, 1, False, False, rows)
    for got_features, got_gradients in run_ranks(forward_backward, size, size, sequence_parallel, checkpointing, rows):
        for got, expected in zip(got_features, features):
            assert float((got - expected).norm() / expected.norm()) < 1e-12
        assert set(got_gradients) == set(gradients)
        for name, expected in gradients.items():
            assert float((got_gradients[name] - expected).norm()) < 1e-11 * max(1.0, float(expected.norm())), name


class SentDtypes(TorchDispatchMode):
    """The dtype of every tensor that is all-reduced."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("c10d::allreduce_", "_c10d_functional::all_reduce"):
            self.dtypes.append(torch.utils._pytree.tree_leaves(args[0])[0].dtype)
        return function(*args, **kwargs or {})


def autocast_dtypes(rank, world_size):
    """Under autocast: [dtype of what the ranks send], and gradients beside those of the whole model."""
    from megatron_patches.towers import split_towers

    gradients, sent = [], SentDtypes()
    images, texts = global_batch(4, seed=5)
    for split in (False, True):
        model = new_model()
        if split:
            split_towers(model, layout(world_size).tp_group)
        with sent:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(images, texts)
            (out["image_features"][:, 0].sum() + out["text_features"][:, 1].sum()).backward()
        gradients.append(whole_values(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad))
    return sent.dtypes, gradients


def test_under_autocast_the_ranks_send_bfloat16_and_gradients_agree_within_its_rounding():
    sent, (plain, split) = run_ranks(autocast_dtypes, 2)[0]
    layers = CFG.vision_cfg.layers + CFG.text_cfg.layers
    assert sent.count(torch.bfloat16) == 4 * layers and sent.count(torch.float32) == 1  # the one: conv1's gradient
    for name, expected in plain.items():
        if not name.endswith("in_proj_bias"):
            assert float((split[name] - expected).norm()) <= 0.05 * float(expected.norm()), name


def fifty_steps(rank, world_size, preset, sequence_parallel):
    """-> {name: bytes} of every parameter that is not split, after 50 steps on this rank."""
    from tests.tensor_parallel import settings, train_steps

    parallel = layout(2)
    config = settings(preset, 2, sequence_parallel=sequence_parallel, lr=3e-3, grad_clip_norm=None)
    engine, *_ = train_steps(parallel, config, 50, micro_batches=1, patch_dropout=0.25)
    values = {n: engine.state.read(p) for n, p in engine.state.parameters() if not hasattr(p, "tensor_parallel_split")}
    return {name: value.numpy().tobytes() for name, value in values.items()}


@pytest.mark.parametrize(
    ("preset", "sequence_parallel"), [("zero1", True), pytest.param("zero3", False, marks=pytest.mark.slow)]
)
def test_replicated_parameters_stay_equal_to_the_bit_over_fifty_steps(preset, sequence_parallel):
    first, second = run_ranks(fifty_steps, 2, preset, sequence_parallel)
    assert len(first) > 30 and [name for name in first if first[name] != second[name]] == []
