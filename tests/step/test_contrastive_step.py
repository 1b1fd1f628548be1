"""contrastive_step of others' encoders under every wrapper equals one float64 process that sees the whole batch.

The models are HF's BERT and timm's ViT, small, from their configs, with dropout. The reference encodes each micro-batch
once, under the random numbers that its rank draws, and takes the loss of all ranks' rows in one graph.
"""

import random
import sys
from collections import namedtuple
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infcl import Encoders, contrastive_step, inf_cl_loss, info_nce_loss, siglip_loss, split_batch
from infcl.engine.engine import _import_deepspeed
from infcl.parallel import Parallel
from tests.lib.engine_steps import accumulate, engine_on_cpu
from tests.lib.open_clip_stub import declare_torchvision_operators, import_transformers
from tests.lib.ranks import rejected, run_ranks
from tests.lib.step_oracle import LR, adamw, worst_error

STEPS, ROWS, SIZE = 3, 5, 2  # rows of a rank, of which three micro-batches are made: 2, 2, 1
LOSSES = {"inf_cl": inf_cl_loss, "siglip": siglip_loss}
declare_torchvision_operators()  # on the ranks too


@pytest.fixture(scope="module", autouse=True)
def _are_installed():
    import_transformers()
    pytest.importorskip("timm")


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


WRAPPERS = ("plain", "fsdp2", "zero3", "ddp", "zero0", "zero1", "zero2")
DEFAULT = [("ddp", 2, "siglip", 9), *((wrapper, 2, "inf_cl", 1) for wrapper in WRAPPERS)]
DEFAULT += [("fsdp2", 3, "info_nce", 2), ("zero3", 3, "info_nce", 9), ("zero1", 2, "siglip", 9)]
KINDS = (("inf_cl", 1), ("siglip", 2), ("info_nce", 9))
MATRIX = [(wrapper, world_size, *kind) for wrapper in WRAPPERS for world_size in (1, 4) for kind in KINDS]


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("wrapper", "world_size", "name", "cached_activations"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in MATRIX)],
)
def test_three_steps_equal_those_of_one_float64_process(wrapper, world_size, name, cached_activations):
    losses, state = run_ranks(train, world_size, wrapper, name, cached_activations)[0]
    expected_losses, expected = in_float64(world_size, name)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert worst_error(state, expected) < 1e-5


# ---- parameters that only some micro-batches use ----


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
        loss = dense_loss("inf_cl", (torch.cat(queries), torch.cat(documents)), scales[0])
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
    if kind == "static graph":
        return rejected(contrastive_step, nn.parallel.DistributedDataParallel(linear(), static_graph=True), PAIRS, loss)
    if kind == "no wrapper":
        return rejected(contrastive_step, linear(), PAIRS, loss)
    empty = kind == "zero3"
    pattern = (1, 0, 0) if rank == 0 and not empty else (0, 1, 0)
    return rejected(contrastive_step, mixed_engine(kind, empty=empty), mixed_batches(0, rank, pattern), loss)


@pytest.mark.parametrize(
    ("kind", "world_size", "message"),
    [
        ("zero2", 2, "must use the same parameters on all ranks"),
        ("zero2 overlap offload", 2, "must use the same parameters on all ranks"),
        ("zero3", 2, "empty: no elements, which ZeRO-3 cannot gather"),
        ("static graph", 1, "static_graph"),
        ("no wrapper", 2, "no wrapper averages the gradients of logit_scale and 2 more parameters"),
    ],
)
def test_steps_that_wrappers_cannot_make_are_rejected_on_all_ranks(kind, world_size, message):
    for rejection in run_ranks(step_that_is_rejected, world_size, kind):
        assert message in rejection


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


class ZeroSide(Noisy):
    """As Noisy, with a second output that is all zero."""

    def forward(self, values):
        return super().forward(values), 0 * self.linear(values)


def dense_clip(queries, documents, scale=1.0):
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


@pytest.mark.parametrize("bad", [0, 1])
def test_running_statistics_that_are_not_finite_are_not_published(bad):
    """Nor is any of a step that raises an error."""
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    micro_batches = split_batch(batch_of(6), 3)
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    before = {key: value.clone() for key, value in encoder[1].state_dict().items()}

    def fails(*_):
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        contrastive_step(Encoders(encoder), micro_batches, fails)
    micro_batches[bad][0][1] = float("nan")
    contrastive_step(Encoders(encoder), micro_batches, dense_clip)
    for key, value in encoder[1].state_dict().items():
        assert torch.equal(value, before[key]), key


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
        (ZeroSide("random"), [rows for rows, _ in PAIRS], "pass 2 gives other features than pass 1"),
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
    class Model(nn.Linear):
        def forward(self, pair, options):
            images, texts = super().forward(pair[0]), super().forward(pair[1]["x"])
            return {"texts": texts, "images": images, "scale": images.new_tensor(2.0)}

    def loss(*, images, texts, scale):
        return dense_loss("inf_cl", (images, texts), scale)

    images, texts = batch_of(5)
    model, gradients = Model(6, 4), []
    for size in (2, 5):
        batch = {"pair": (images, {"x": texts, "names": list("abcde")}), "options": None}
        contrastive_step(model, split_batch(batch, size), loss)
        gradients.append(model.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients)


Pair = namedtuple("Pair", "image text")
IMAGES, TEXTS, WORDS = torch.arange(12).view(4, 3), torch.arange(20).view(4, 5), ("a", "b", "c", "d")
RAGGED = [torch.arange(3 * rows).view(3, rows) for rows in (1, 2, 3, 4)]  # images of different widths


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        ([IMAGES, TEXTS], (IMAGES[2:], TEXTS[2:])),  # default_collate
        ([IMAGES, WORDS], (IMAGES[2:], ["c", "d"])),  # default_collate of samples with a string
        ([IMAGES, list(WORDS)], (IMAGES[2:], ["c", "d"])),
        (list(WORDS), ["c", "d"]),
        ((list(WORDS), WORDS), (["c", "d"], ["c", "d"])),
        (Pair(IMAGES, WORDS), Pair(IMAGES[2:], ["c", "d"])),
        ({"image": IMAGES.numpy(), "n": 3}, {"image": IMAGES.numpy()[2:], "n": 3}),
        ((RAGGED, WORDS), (RAGGED[2:], ["c", "d"])),
        ((IMAGES, [[1], [1, 2], [1, 2, 3], []]), (IMAGES[2:], [[1, 2, 3], []])),
        (((IMAGES, TEXTS), [IMAGES, TEXTS], WORDS), ((IMAGES[2:], TEXTS[2:]), [IMAGES[2:], TEXTS[2:]], ["c", "d"])),
        ((IMAGES, [{"x": row} for row in WORDS]), (IMAGES[2:], [{"x": "c"}, {"x": "d"}])),
    ],
)
def test_each_kind_of_batch_is_split_by_its_rows(batch, second):
    micro_batches = split_batch(batch, 2)
    assert len(micro_batches) == 2
    assert type(micro_batches[1]) is type(second)
    assert repr(micro_batches[1]) == repr(second)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3, 2)), "a batch of 4 rows"),
        ((torch.zeros(4, 2), ["a", "b"]), r"list\('a', 'b'\) in a batch of 4 rows"),
        ({"x": 3}, "no tensor with rows"),
        (([torch.zeros(3, 2)] * 4,), "may have 3 or 4 rows"),
        ((torch.zeros(2, 2), [torch.zeros(2, 3)] * 2), r"\) in a batch of 2 rows"),
    ],
)
def test_a_batch_that_has_no_common_rows_or_several_is_rejected(batch, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)
