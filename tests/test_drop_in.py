"""InfCLLoss stands where open_clip's ClipLoss stood: its arguments, its averages, in a plain DDP loop."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from infcl import InfCLLoss
from tests.loss_oracle import relative_error
from tests.ranks import run_ranks

DOCUMENT = Path(__file__).parent.parent / "docs" / "loss.md"


class _TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.image, self.text = (nn.Parameter(torch.randn(6, 8, generator=generator)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        images, texts = (nn.functional.normalize(x, dim=1) for x in (images @ self.image, texts @ self.text))
        return images, texts, self.log_scale.exp()


def _batches(rank, world_size):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(10, 6, generator=generator).chunk(world_size)[rank] for _ in range(2)) for _ in range(3)]


def _train(rank, world_size):
    """The documentation's example."""
    (example,) = re.findall(r"```python\n(def train.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names = {"torch": torch, "InfCLLoss": InfCLLoss}
    exec(example, names)
    model = _TwoTowers()
    names["train"](rank, world_size, model, _batches(rank, world_size))
    return {name: value.detach() for name, value in model.named_parameters()}


def test_the_documented_ddp_loop_trains_as_one_process_on_the_whole_batch():
    model = _TwoTowers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, texts in _batches(0, 1):
        image_features, text_features, scale = model(images.double(), texts.double())
        logits, labels = scale * image_features @ text_features.T, torch.arange(10)
        loss = (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weights in run_ranks(_train, 2):
        for name, value in model.named_parameters():
            assert relative_error(weights[name], value.detach()) < 1e-5, name


def _refusals(rank, world_size):
    arguments = [
        {"rank": rank, "world_size": 2},
        {"local_loss": True, "rank": rank, "world_size": 2},
        {"local_loss": True, "gather_with_grad": True, "rank": 1 - rank, "world_size": 2},
        {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": 4},
    ]
    messages = []
    for options in arguments:
        try:
            InfCLLoss(**options)
        except ValueError as error:
            messages.append(str(error))
    accepted = InfCLLoss(False, True, True, rank, world_size)  # open_clip's order
    assert accepted.options["group"] is dist.group.WORLD
    return messages


def test_contradictory_arguments_are_refused_with_the_numbers():
    for rank, messages in enumerate(run_ranks(_refusals, 2)):
        assert len(messages) == 4
        assert all("world_size 2 with gather_with_grad=False" in message for message in messages[:2])
        assert f"rank {1 - rank}, world_size 2: the process group says {rank}, 2" in messages[2]
        assert f"rank {rank}, world_size 4: the process group says {rank}, 2" in messages[3]


def test_arguments_without_a_process_group_are_refused():
    with pytest.raises(ValueError, match="rank 0, world_size 2: torch.distributed is not initialised"):
        InfCLLoss(gather_with_grad=True, world_size=2)
    with pytest.raises(ValueError, match="use_horovod"):
        InfCLLoss(use_horovod=True)
    InfCLLoss(local_loss=False, gather_with_grad=False, cache_labels=True, rank=0, world_size=1)
