"""contrastive_step of others' encoders under every wrapper equals one float64 process that sees the whole batch.

The models are HF's BERT and timm's ViT, small, from their configs, with dropout. The reference encodes each micro-batch
once, under the random numbers that its rank draws, and takes the loss of all ranks' rows in one graph.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infcl import Encoders, contrastive_step, inf_cl_loss, info_nce_loss, siglip_loss, split_batch
from infcl.engine.engine import _import_deepspeed
from tests.lib.open_clip_stub import declare_torchvision_operators, import_transformers
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import adamw, worst_error

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
