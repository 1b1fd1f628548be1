"""Towers in parts equal the whole ones: state dict, features, gradients; what must not be split stays equal."""

import contextlib
import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infcl.config import BatchPlan
from infcl.models import CLIP, CLIPConfig, TextConfig, VisionConfig, load_model_config
from tests.lib.fp16 import fp16_allowed, fp16_preset
from tests.lib.loss_oracle import relative_error
from tests.lib.ranks import run_ranks
from tests.lib.tensor_parallel import CFG, batch_of_pairs, layout, new_model


def whole_values(model, part_of=lambda parameter: parameter.detach()) -> dict[str, torch.Tensor]:
    values = {}
    for name, parameter in model.named_parameters():
        split = getattr(parameter, "tensor_parallel_split", None)
        values[name] = part_of(parameter) if split is None else split.full(part_of(parameter))
    return values


def test_a_rejected_size_names_those_that_divide_both_towers():
    """ViT-L-14's image tower alone could be split over 8 ranks, its text tower over 3."""
    for size, count in ((3, "16 heads of the image tower"), (8, "12 heads of the text tower")):
        with pytest.raises(ValueError, match=f"size {size} does not divide the {count}.* over 2, 4 ranks"):
            load_model_config("ViT-L-14").check_divides(size)


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


def forward_backward(rank, world_size, size, checkpointing, rows, cfg=CFG):
    """float64 gradients of a fixed surrogate -> (features, whole gradients)."""
    from megatron_patches.towers import split_towers

    model = new_model(cfg, activation_checkpointing=checkpointing).double()
    if size > 1:
        split_towers(model, layout(size).tp_group)
    images, texts = batch_of_pairs(rows, 5, cfg)
    features = model.visual(images.double()), model.encode_text(texts)
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(f.shape, generator=generator, dtype=f.dtype) for f in features]
    # expand: a gradient that is not contiguous must be summed over the ranks all the same
    (sum((f * w).sum() for f, w in zip(features, weights)) + model.logit_scale.expand(3).sum()).backward()
    return [f.detach() for f in features], whole_values(model, lambda parameter: parameter.grad)


def drawn(seed: int, size: int) -> tuple:
    """Arguments of forward_backward: towers down to one head, and one hidden feature, of each of `size` ranks."""
    draw = random.Random(seed)
    towers = {}
    for tower in ("vision", "text"):
        heads, head_width = size * draw.randint(1, 3), draw.randint(2, 9)
        hidden, width = size * draw.randint(1, 20), heads * head_width
        towers[tower] = {"width": width, "layers": draw.randint(1, 4), "mlp_ratio": hidden / width}
        towers[tower] |= {"head_width": head_width} if tower == "vision" else {"heads": heads}
    patch = draw.randint(2, 4)
    cfg = CLIPConfig(
        embed_dim=draw.randint(2, 25),
        vision_cfg=VisionConfig(image_size=patch * draw.randint(1, 4), patch_size=patch, **towers["vision"]),
        text_cfg=TextConfig(context_length=draw.randint(1, 9), vocab_size=draw.randint(2, 40), **towers["text"]),
    )
    return size, draw.random() < 0.3, draw.randint(1, 7), cfg


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "given",
    [  # size, checkpointing, rows: also where the samples do not divide by T
        *((2, False, 3, CFG), (4, True, 5, CFG)),
        *(drawn(seed, size) for size in (2, 4) for seed in range(4)),
    ],
    ids=lambda given: "-".join(map(str, given[:3])),
)
def test_features_and_gradients_equal_the_whole_models(given):
    size, _, rows, cfg = given
    features, gradients = forward_backward(0, 1, 1, False, rows, cfg=cfg)
    for got_features, got_gradients in run_ranks(forward_backward, size, *given):
        for got, expected in zip(got_features, features):
            assert relative_error(got, expected) < 1e-12, given
        assert set(got_gradients) == set(gradients)
        for name, expected in gradients.items():
            assert float((got_gradients[name] - expected).norm()) < 1e-11 * max(1.0, float(expected.norm())), name


class SentDtypes(TorchDispatchMode):
    """The dtype of every tensor that a collective sends."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        collectives = ("all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "reduce_scatter_tensor")
        if function.name() in ("c10d::allreduce_", *(f"_c10d_functional::{name}" for name in collectives)):
            self.dtypes.append(torch.utils._pytree.tree_leaves(args[0])[0].dtype)
        return function(*args, **kwargs or {})


def autocast_dtypes(rank, world_size):
    """Under autocast: [dtype of what the ranks send], and gradients compared with those of the whole model."""
    from megatron_patches.towers import split_towers

    gradients, sent = [], SentDtypes()
    images, texts = batch_of_pairs(4, seed=5)
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
    """Of a block four sums of activations are sent; of float32 only conv1's gradient."""
    sent, (plain, split) = run_ranks(autocast_dtypes, 2)[0]
    assert sent.count(torch.bfloat16) == 4 * (CFG.vision_cfg.layers + CFG.text_cfg.layers)
    assert sent.count(torch.float32) == 1
    for name, expected in plain.items():
        if not name.endswith("in_proj_bias"):
            assert float((split[name] - expected).norm()) <= 0.05 * float(expected.norm()), name


def fifty_steps(rank, world_size):
    """-> {name: bytes} of every parameter that is not split, after 50 steps on this rank.

    Convolutions add up in another order on the second rank, as cuDNN may: a bit of their gradients is another.
    """
    from tests.lib.engine_steps import SPLIT, engine_steps

    def added_up_otherwise():
        model = new_model(patch_dropout=0.25)
        model.visual.conv1.weight.register_hook(lambda gradient: gradient * (1 + rank * 2**-22))
        return model

    subject = SPLIT._replace(model=added_up_otherwise, micro_batches=1, numbers=range(50), grad_clip_norm=None)
    options = {"tensor_parallel_size": 2, "lr": 3e-3, "look": whole_parameters}
    values = engine_steps(rank, world_size, subject, "zero1", **options).seen
    return {name: value.numpy().tobytes() for name, value in values.items()}


def whole_parameters(engine) -> dict[str, torch.Tensor]:
    """Return what this rank holds of parameters that are not split."""
    named = engine.state.parameters()
    return {name: engine.state.read(p).clone() for name, p in named if not hasattr(p, "tensor_parallel_split")}


@pytest.mark.long
def test_replicated_parameters_stay_equal_to_the_bit_over_fifty_steps():
    first, second = run_ranks(fifty_steps, 2)
    assert len(first) > 30 and [name for name in first if first[name] != second[name]] == []


POISONED = {1: "visual.ln_pre.weight", 3: "logit_scale"}  # step -> a whole parameter


def steps_of_which_two_are_poisoned(rank, world_size, preset, precision):
    """Five steps; in two the gradient of a whole parameter is not a number on tensor-parallel rank 1 of the first copy
    -> whether each was applied, counters, the weights that this rank holds of whole parameters."""
    from infcl.train.build import split_model
    from tests.lib.engine_steps import settings
    from tests.lib.specs import engine_of

    parallel, config = layout(2), settings(preset, precision=precision, tensor_parallel_size=2)
    model, now, applied = new_model(), [], []
    split_model(model, parallel)
    for name, parameter in model.named_parameters():
        if name in POISONED.values():
            parameter.register_hook(lambda gradient, name=name: gradient * (math.nan if name in now else 1))
    with fp16_allowed() if precision == "fp16" else contextlib.nullcontext():
        engine = engine_of(model, config, parallel, BatchPlan(parallel.dp_size, 1, 4))
        engine.train()
        for step in range(5):
            now[:] = [POISONED.get(step)] if parallel.tp_rank == 1 and parallel.dp_rank == 0 else []
            output = engine.encode(*batch_of_pairs(4, seed=10 * step + parallel.dp_rank))
            engine.backward(sum(value.float().flatten()[::3].sum() for value in output.values()), is_last=True)
            applied.append(engine.step(config.lr))
            assert engine.norms[:2].isfinite().all() and engine.norms[2].isfinite() == applied[-1]
    whole = whole_parameters(engine)
    assert set(POISONED.values()) <= set(whole)
    return applied, engine.counters(), whole


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("preset", "precision"),
    [("zero1", "bf16"), ("zero0", "fp32"), ("zero3_offload", "fp32"), ("zero3", "bf16")]
    + [("zero1", "fp16"), ("zero3", "fp16")],
)
def test_what_is_not_finite_on_a_later_tensor_parallel_rank_skips_the_step_on_all(preset, precision, tmp_path):
    """A norm counts a whole parameter on tensor-parallel rank 0 only."""
    preset = fp16_preset(tmp_path, preset) if precision == "fp16" else preset
    results = run_ranks(steps_of_which_two_are_poisoned, 4, preset, precision)
    for applied, counters, weights in results:
        assert applied == [True, False, True, False, True]
        assert counters["optimizer_step"] == 3 and counters["skipped_steps"] == 2
        assert precision != "fp16" or counters["cur_scale"] == 2**6
        for name, value in weights.items():
            assert value.isfinite().all() and torch.equal(value, results[0][2][name]), name
