"""InfCLLoss stands where open_clip's ClipLoss stood: its arguments, its averages, in a plain DDP loop."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from infcl import InfCLLoss, SigLipLoss, inf_cl_loss
from tests.lib.loss_oracle import means_over_ranks, relative_error
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.ranks import rejected, run_ranks


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
    """The loop of docs/start/loss_in_ddp.md."""
    towers = _TwoTowers()
    model = nn.parallel.DistributedDataParallel(towers)
    loss = InfCLLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, texts in _batches(rank, world_size):
        optimizer.zero_grad()
        loss(*model(images, texts)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in towers.named_parameters()}


def test_a_ddp_loop_trains_as_one_process_on_the_whole_batch():
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


@pytest.mark.parametrize(("ours", "name"), [(InfCLLoss, "ClipLoss"), (SigLipLoss, "SigLipLoss")])
@pytest.mark.parametrize("function", ["__init__", "forward"])
def test_arguments_are_in_open_clips_order(ours, name, function):
    theirs = getattr(import_open_clip().loss, name)
    parameters, expected = (inspect.signature(getattr(cls, function)).parameters for cls in (ours, theirs))
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(expected)[: len(positional)]
    if ours is InfCLLoss:
        assert len(positional) == len(expected)
        assert all(parameters[name].default == expected[name].default for name in positional)


@pytest.mark.parametrize("init_logit_bias", [None, -10.0])
def test_it_is_called_as_open_clips_trainer_calls_its_own(init_logit_bias):
    """loss(**model_out, output_dict=True), and as its other losses call their base class."""
    open_clip = import_open_clip()
    vision = {"image_size": 32, "layers": 1, "width": 48, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 90, "width": 32, "heads": 4, "layers": 1}
    model = open_clip.model.CLIP(24, vision, text, init_logit_bias=init_logit_bias, output_dict=True)
    model_out = model(torch.randn(5, 3, 32, 32), torch.randint(1, 90, (5, 12)))
    ours, theirs = (loss(**model_out, output_dict=True) for loss in (InfCLLoss(), open_clip.ClipLoss()))
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs)
    features = model_out["image_features"], model_out["text_features"], model_out["logit_scale"]
    torch.testing.assert_close(InfCLLoss()(*features), open_clip.ClipLoss()(*features))


def test_siglip_replaces_open_clips():
    """Its loss and, averaged over ranks as data parallelism does, its gradients."""
    theirs = import_open_clip().loss.SigLipLoss
    everything = _siglip_features()
    reference = theirs()(*everything, output_dict=True)["contrastive_loss"]
    expected = [reference.detach(), *torch.autograd.grad(reference, everything)]
    loss, *gradients = means_over_ranks(run_ranks(_siglip, 2))
    assert relative_error(loss, expected[0]) < 1e-6
    for gradient, true in zip(gradients, expected[1:], strict=True):
        assert relative_error(gradient, true) < 1e-5


def _siglip_features():
    generator = torch.Generator().manual_seed(0)
    sides = [nn.functional.normalize(torch.randn(10, 8, generator=generator), dim=1) for _ in range(2)]
    return [x.requires_grad_() for x in (*sides, torch.tensor(10.0), torch.tensor(-5.0))]


def _siglip(rank, world_size):
    images, texts, scale, bias = _siglip_features()
    own = [side.chunk(world_size)[rank].detach().requires_grad_() for side in (images, texts)]
    loss = SigLipLoss(rank=rank, world_size=world_size)(*own, scale, bias)
    return loss.detach(), *torch.autograd.grad(loss, (*own, scale, bias))


def _rejections(rank, world_size):
    arguments = [
        {"rank": rank, "world_size": 2},
        {"local_loss": True, "rank": rank, "world_size": 2},
        {"local_loss": True, "gather_with_grad": True, "rank": 1 - rank, "world_size": 2},
        {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": 4},
    ]
    messages = [rejected(InfCLLoss, **options) for options in arguments]
    accepted = InfCLLoss(False, True, True, rank, world_size)  # open_clip's order
    features = torch.nn.functional.normalize(
        torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank)), dim=-1
    )
    everyone = inf_cl_loss(*features, 5.0, group=dist.group.WORLD)
    for loss in (accepted, copy.deepcopy(accepted), pickle.loads(pickle.dumps(accepted))):
        assert torch.equal(loss(*features, 5.0), everyone), "of all ranks, a copy of it too"
    return messages


def test_contradictory_arguments_are_rejected_with_the_numbers():
    for rank, messages in enumerate(run_ranks(_rejections, 2)):
        assert all("world_size 2 with gather_with_grad=False" in message for message in messages[:2])
        assert f"rank {1 - rank}, world_size 2: the process group says {rank}, 2" in messages[2]
        assert f"rank {rank}, world_size 4: the process group says {rank}, 2" in messages[3]


def test_arguments_without_a_process_group_are_rejected():
    with pytest.raises(ValueError, match="rank 0, world_size 2: torch.distributed is not initialised"):
        InfCLLoss(gather_with_grad=True, world_size=2)
    with pytest.raises(ValueError, match="use_horovod"):
        InfCLLoss(use_horovod=True)
    InfCLLoss(local_loss=False, gather_with_grad=False, cache_labels=True, rank=0, world_size=1)
