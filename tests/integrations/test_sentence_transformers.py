"""The loss for sentence-transformers equals one float64 process that sees all ranks' rows, and its own cached loss."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.lib.open_clip_stub import declare_torchvision_operators, import_transformers
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import adamw, worst_error

STEPS, ROWS, SIZE = 3, 5, 2
declare_torchvision_operators()  # on the ranks too


@pytest.fixture(scope="module", autouse=True)
def _is_installed():
    """Import them when these tests run: every worker of a suite imports this file."""
    import_transformers()
    pytest.importorskip("sentence_transformers", exc_type=ImportError)


def make_model(dropout: float = 0.1):
    """A small BERT with mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel

    class Bert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
            rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            config = BertConfig(vocab_size=50, max_position_embeddings=8, attn_implementation="eager", **sizes, **rates)
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, given):
            tokens = self.bert(given["input_ids"], given["attention_mask"]).last_hidden_state
            return given | {"token_embeddings": tokens}

    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Bert(), Pooling(16)], device="cpu")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases that no gradient moves (keys') would be 0, without a relative error
            parameter.data += 0.5 * torch.randn_like(parameter)
    return model.train()


def ring_loss(*args, **options):
    from infcl.integrations.sentence_transformers import RingMultipleNegativesRankingLoss

    return RingMultipleNegativesRankingLoss(*args, **options)


def columns_of(step: int, rank: int, columns: int):
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(2, 7, (columns, ROWS, 1), generator=generator)
    return [
        {
            "input_ids": torch.randint(1, 50, (ROWS, 6), generator=generator),
            "attention_mask": (torch.arange(6) < length).long(),
        }
        for length in lengths
    ]


def in_float64(world_size: int, columns: int, symmetric: bool):
    model = make_model().double()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        embeddings = [[] for _ in range(columns)]
        for rank in range(world_size):
            torch.manual_seed(10 * step + rank)
            for given, column in zip(columns_of(step, rank, columns), embeddings):
                for begin in range(0, ROWS, SIZE):
                    part = {key: value[begin : begin + SIZE] for key, value in given.items()}
                    part = {key: value[:, : part["attention_mask"].sum(1).max()] for key, value in part.items()}
                    column.append(model(part)["sentence_embedding"])
        anchors, *documents = (F.normalize(torch.cat(column), dim=-1) for column in embeddings)
        labels = torch.arange(len(anchors))
        loss = F.cross_entropy(20 * anchors @ torch.cat(documents).T, labels)
        if symmetric:
            loss = (loss + F.cross_entropy(20 * documents[0] @ anchors.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.float() for key, value in model.state_dict().items()}


def train(rank: int, world_size: int, columns: int, symmetric: bool):
    model = make_model()
    loss = ring_loss(model, mini_batch_size=SIZE, symmetric=symmetric)
    if world_size > 1:
        loss.model = torch.nn.parallel.DistributedDataParallel(model)  # as the trainer puts it there
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        value = loss(columns_of(step, rank, columns), None)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = value.detach().clone()
        if world_size > 1:
            dist.all_reduce(whole)
        losses.append(float(whole) / world_size)
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


def on_ranks(function, world_size: int, *args) -> list:
    """Call it on so many ranks. A single one is this process, which has imported the package."""
    return run_ranks(function, world_size, *args) if world_size > 1 else [function(0, 1, *args)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("world_size", "columns", "symmetric"), [(1, 2, True), (2, 4, True), (2, 3, False)])
def test_three_steps_equal_those_of_one_float64_process(world_size, columns, symmetric):
    losses, state = on_ranks(train, world_size, columns, symmetric)[0]
    expected_losses, expected = in_float64(world_size, columns, symmetric)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert worst_error(state, expected) < 1e-5


DIRECTIONS = (
    ("query_to_doc",),
    ("query_to_doc", "query_to_query"),
    ("query_to_doc", "doc_to_doc"),
    ("query_to_doc", "query_to_query", "doc_to_doc"),
)


def both_losses(rank: int, world_size: int, symmetric: bool, directions: tuple[str, ...]) -> list[tuple[float, list]]:
    """-> loss and gradients of our loss and of the package's, of this rank."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    model, options = make_model(0.0), {"scale": 2.0, "similarity_fct": dot_score, "mini_batch_size": 3}
    ours = ring_loss(model, symmetric=symmetric, directions=directions, **options)
    theirs = CachedMultipleNegativesRankingLoss(
        model, **options, directions=ours.directions, partition_mode=ours.partition_mode, gather_across_devices=True
    )
    results = []
    for loss in (ours, theirs):
        value = loss(columns_of(0, rank, 3), None)
        value.backward()
        results.append((value.item(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    return results


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("world_size", "symmetric", "directions"),
    [(1, False, DIRECTIONS[3]), (1, True, DIRECTIONS[0]), (2, False, DIRECTIONS[3])]
    + [(size, False, of) for size, of in zip((1, 2, 3), DIRECTIONS)],
)
def test_loss_and_gradients_equal_those_of_the_package(world_size, symmetric, directions):
    ranks = on_ranks(both_losses, world_size, symmetric, directions)
    for ours, theirs in ranks:
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    ours, theirs = ([sum(of) for of in zip(*(rank[which][1] for rank in ranks))] for which in (0, 1))
    for gradient, expected in zip(ours, theirs):
        assert (gradient - expected).norm() < 1e-4 * expected.norm() + 1e-7


def test_a_margin_leaves_out_what_is_more_similar_than_the_positive():
    model = make_model(0.0)
    loss = ring_loss(model, margin=-0.05, directions=DIRECTIONS[1])
    columns = columns_of(0, 0, 2)
    anchors, documents = (F.normalize(model(dict(given))["sentence_embedding"], dim=-1) for given in columns)
    cosines = torch.cat([anchors @ documents.T, (anchors @ anchors.T).fill_diagonal_(-torch.inf)], 1)
    own = F.one_hot(torch.arange(ROWS), 2 * ROWS).bool()
    beyond = (cosines > cosines[own][:, None] - 0.05) & ~own
    assert 0 < beyond.sum() < beyond.numel() - ROWS
    expected = F.cross_entropy(20 * cosines.masked_fill(beyond, -torch.inf), torch.arange(ROWS))
    assert loss(columns, None).item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_the_ring_lacks_is_rejected():
    for options, message in (
        ({"directions": ("query_to_doc", "doc_to_query")}, "give query_to_doc, alone or with"),
        ({"directions": DIRECTIONS[1], "symmetric": True}, "give query_to_doc, alone or with"),
        ({"similarity_fct": torch.cdist}, "cos_sim and dot_score"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_loss(make_model(), **options)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_both_passes_have_the_autocast_of_the_forward(backward_inside):
    model, seen = make_model(), []
    layer = model[0].bert.encoder.layer[0].output.dense
    layer.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    loss = ring_loss(model, mini_batch_size=SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(columns_of(0, 0, 2), None)
        if backward_inside:
            value.backward()
    if not backward_inside:
        value.backward()
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 6 and all(output.dtype == torch.bfloat16 for output in seen)
    assert all(map(torch.equal, first, second))
    assert layer.weight.grad.norm() > 0
