"""contrastive_step of others' encoders under every wrapper equals one float64 process that sees the whole batch.

The models are HF's BERT and timm's ViT, small, from their configs, with dropout. The reference encodes each micro-batch
once, under the random numbers that its rank draws, and takes the loss of all ranks' rows in one graph.
"""

import random
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infcl import Encoders, contrastive_step, inf_cl_loss, info_nce_loss, siglip_loss, split_batch
from infcl.engine.engine import _import_deepspeed
from tests.lib.open_clip_stub import import_transformers
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import adamw, worst_error

import_transformers()
pytest.importorskip("timm")

STEPS, ROWS, SIZE = 3, 5, 2  # rows of a rank, of which three micro-batches are made: 2, 2, 1
LOSSES = {"inf_cl": inf_cl_loss, "siglip": siglip_loss}


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=50, max_position_embeddings=8, attn_implementation="eager", **sizes)
    return BertModel(config, add_pooling_layer=False)


def vit():
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 16}
    return timm.models.VisionTransformer(**sizes, drop_rate=0.1, pos_drop_rate=0.1, drop_path_rate=0.2)


def features(output, given):
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state[:, 0]


def make_model(loss: str) -> Encoders:
    """Two encoders, or for info_nce one for queries, documents and hard negatives."""
    torch.manual_seed(0)
    encoders = (bert(),) if loss == "info_nce" else (vit(), bert())
    scalars = {"logit_scale": 10.0, "logit_bias": -2.0 if loss == "siglip" else None}
    model = Encoders(*encoders, features=features, **scalars)
    for parameter in model.encoders.parameters():
        if parameter.ndim == 1:  # biases that no gradient moves (keys') would be 0, without a relative error
            parameter.data += 0.5 * torch.randn_like(parameter)
    return model.train()


def rank_batch(loss: str, step: int, rank: int):
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(ROWS, 3, 8, 8, generator=generator)
    texts = []
    for _ in range(3):
        tokens = torch.randint(1, 50, (ROWS, 6), generator=generator)
        mask = (torch.arange(6) < torch.randint(2, 7, (ROWS, 1), generator=generator)).long()
        texts.append(BatchEncoding({"input_ids": tokens, "attention_mask": mask}))
    return tuple(texts) if loss == "info_nce" else (images, texts[0])


def seed_rank(step: int, rank: int) -> None:
    torch.manual_seed(10 * step + rank)


def loss_over(name: str, group):
    if name != "info_nce":
        return partial(LOSSES[name], group=group)

    def with_hard_negatives(queries, documents, negatives, scale):
        answers = torch.arange(len(queries))
        return info_nce_loss(queries, torch.cat([documents, negatives]), answers, scale, group=group)

    return with_hard_negatives


def dense_loss(name: str, sides, scale, bias=0.0):
    """The definitions, over all rows."""
    queries, labels = sides[0], torch.arange(len(sides[0]))
    logits = scale * queries @ torch.cat(sides[1:]).T + bias
    if name == "siglip":
        return -F.logsigmoid((2 * torch.eye(len(labels)) - 1) * logits).sum() / len(labels)
    rows = F.cross_entropy(logits, labels)
    return rows if name == "info_nce" else (rows + F.cross_entropy(logits.T, labels)) / 2


def in_float64(world_size: int, name: str):
    """(losses, state) of the steps of one process."""
    model = make_model(name).double()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        outputs = []
        for rank in range(world_size):
            seed_rank(step, rank)
            for micro_batch in split_batch(rank_batch(name, step, rank), SIZE):
                outputs.append(model(*(x.double() if isinstance(x, torch.Tensor) else x for x in micro_batch)))
        sides = 3 if name == "info_nce" else 2
        whole = [torch.cat(side) for side in zip(*(output[:sides] for output in outputs))]
        loss = dense_loss(name, whole, *outputs[0][sides:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach().float() for key, value in model.state_dict().items()}


def wrapped(wrapper: str, model: nn.Module):
    """(what the step gets, its optimizer or DeepSpeed engine, what returns the whole weights)"""
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        return model, adamw(model.parameters()), model.module.state_dict
    if wrapper == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for encoder in model.encoders:
            for block in encoder.blocks if hasattr(encoder, "blocks") else encoder.encoder.layer:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, adamw(model.parameters()), lambda: {k: v.full_tensor() for k, v in model.state_dict().items()}
    if wrapper.startswith("zero"):
        deepspeed = _import_deepspeed()
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": int(wrapper[-1]), "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
        )

        def weights():
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                return {key: value.clone() for key, value in model.state_dict().items()}

        return engine, engine, weights
    return model, adamw(model.parameters()), model.state_dict


def train(rank: int, world_size: int, wrapper: str, name: str, cached_activations: int):
    model, optimizer, weights = wrapped(wrapper, make_model(name))
    loss, losses = loss_over(name, dist.group.WORLD if world_size > 1 else None), []
    for step in range(STEPS):
        seed_rank(step, rank)
        value = contrastive_step(
            model,
            split_batch(rank_batch(name, step, rank), SIZE),
            loss,
            cached_activations=cached_activations,
            group=dist.group.WORLD if wrapper == "plain" else None,
        )
        dist.all_reduce(value)
        losses.append(float(value) / world_size)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach().float().clone() for key, value in weights().items()}


WRAPPERS = ("plain", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
DEFAULT = [(wrapper, 2, "inf_cl", 1) for wrapper in WRAPPERS]
DEFAULT += [
    ("ddp", 1, "siglip", 9),
    ("fsdp2", 2, "siglip", 2),
    ("fsdp2", 3, "info_nce", 2),
    ("zero3", 3, "info_nce", 9),
    ("zero1", 2, "siglip", 9),
]
KINDS = (("inf_cl", 1), ("siglip", 2), ("info_nce", 9))
MATRIX = [(wrapper, world_size, *kind) for wrapper in WRAPPERS for world_size in (1, 2, 3, 4) for kind in KINDS]


@pytest.mark.parametrize(
    ("wrapper", "world_size", "name", "cached_activations"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in MATRIX if case not in DEFAULT)],
)
def test_three_steps_equal_those_of_one_float64_process(wrapper, world_size, name, cached_activations):
    losses, state = run_ranks(train, world_size, wrapper, name, cached_activations)[0]
    expected_losses, expected = in_float64(world_size, name)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert worst_error(state, expected) < 1e-5


# ---- in one process ----


class Noisy(nn.Module):
    """A layer whose forward depends on what torch does not know of, or changes a buffer."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 4), kind
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, values):
        if self.kind == "buffer":
            self.calls += 1
        noise = random.random() if self.kind == "random" else 0.0
        return self.linear(values) + noise * torch.arange(4)


def dense_clip(queries, documents, scale):
    return dense_loss("inf_cl", (queries, documents), scale)


def batch_of(rows: int, *shape: int):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, *(shape or (6,)), generator=generator) for _ in range(2))


def test_running_statistics_move_once_by_the_mean_over_micro_batches():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.3))
    micro_batches = split_batch(batch_of(6), 3)
    values = [encoder[0](side).detach() for micro_batch in micro_batches for side in micro_batch]
    statistics = [torch.stack([each.mean(0), each.var(0)]) for each in values]
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    mean, variance = 0.3 * torch.stack(statistics).mean(0) + 0.7 * torch.stack([torch.zeros(4), torch.ones(4)])
    torch.testing.assert_close(encoder[1].running_mean, mean)
    torch.testing.assert_close(encoder[1].running_var, variance)
    assert encoder[1].num_batches_tracked == 1 and encoder[1].momentum == 0.3


def test_autocast_loses_no_gradient():
    torch.manual_seed(0)
    model = Encoders(nn.Linear(6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        contrastive_step(model, split_batch(batch_of(8), 2), dense_clip)
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in model.parameters())


def test_random_numbers_after_a_step_are_those_after_its_first_pass():
    model = Encoders(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)))
    micro_batches, states = split_batch(batch_of(8), 2), []
    for run in (lambda: contrastive_step(model, micro_batches, dense_clip), lambda: [model(*m) for m in micro_batches]):
        torch.manual_seed(3)
        run()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def linear(*shape):
    return Encoders(nn.Linear(*(shape or (6, 4))))


def returning(forward):
    module = nn.Linear(6, 6)
    module.forward = forward
    return Encoders(module)


THREE_DIMENSIONS = split_batch(batch_of(4, 2, 6), 2)
PAIRS = split_batch(batch_of(8), 2)


@pytest.mark.parametrize(
    ("model", "micro_batches", "message"),
    [
        (Encoders(Noisy("random")), PAIRS, "pass 2 gives other features than pass 1"),
        (Encoders(Noisy("buffer")), PAIRS, "changes the buffer encoders.0.calls"),
        (linear(6, 6), THREE_DIMENSIONS, r"encoder 0 \(Linear\) gives a tensor \(2, 2, 6\)"),
        (returning(lambda rows: (rows,)), THREE_DIMENSIONS, r"\(Linear\) gives tuple\(a tensor \(2, 2, 6\)"),
        (returning(lambda rows: {"pooled": rows}), PAIRS, r"\(Linear\) gives dict\(pooled\)"),
        (nn.Bilinear(6, 6, 1), [tuple(torch.zeros(2, 6))] * 2, "Bilinear returns no features"),
        (
            Encoders(nn.Linear(6, 4), nn.Linear(6, 5)),
            PAIRS,
            r"widths: encoder 0 \(Linear\) \[2, 4\], encoder 1 \(Linear\) \[2, 5\]",
        ),
        (Encoders(*[nn.Linear(6, 6)] * 3), PAIRS, "2 inputs for 3 encoders"),
        (linear().requires_grad_(False), PAIRS, "no parameter of Encoders requires a gradient"),
        (linear(), [], "at least one micro-batch"),
    ],
)
def test_models_and_batches_that_cannot_train_are_rejected_by_name(model, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        contrastive_step(model, micro_batches, dense_clip)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_an_exception_says_where_it_happened():
    with pytest.raises(RuntimeError) as raised:
        contrastive_step(Encoders(nn.Linear(6, 4), nn.Linear(5, 4)), split_batch(batch_of(4), 2), dense_clip)
    notes = raised.value.__notes__
    assert notes == ["in encoder 1 (Linear)", "in Encoders, micro-batch 0 of 2, contrastive_step"]


def test_a_model_may_return_a_mapping_and_take_nested_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, pair, options):
            return {
                "texts": self.linear(pair[1]["x"]),
                "images": self.linear(pair[0]),
                "scale": pair[0].new_tensor(2.0),
            }

    def loss(*, images, texts, scale):
        return dense_loss("inf_cl", (images, texts), scale)

    images, texts = batch_of(5)
    model, gradients = Model(), []
    for size in (2, 5):
        batch = {"pair": (images, {"x": texts, "names": list("abcde")}), "options": None}
        contrastive_step(model, split_batch(batch, size), loss)
        gradients.append(model.linear.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients)


def test_a_batch_that_has_no_common_rows_is_rejected():
    with pytest.raises(ValueError, match="a batch of 4 rows"):
        split_batch((torch.zeros(4, 2), torch.zeros(3, 2)), 2)
    with pytest.raises(ValueError, match="no tensor with rows"):
        split_batch({"x": 3}, 2)


def step_without_a_wrapper(rank: int, world_size: int):
    try:
        contrastive_step(Encoders(nn.Linear(6, 4)), split_batch(batch_of(8), 2), dense_clip)
    except ValueError as error:
        return str(error)


def test_gradients_that_nothing_averages_are_rejected_on_several_ranks():
    for message in run_ranks(step_without_a_wrapper, 2):
        assert "no wrapper averages the gradients of logit_scale and 2 more parameters" in message
