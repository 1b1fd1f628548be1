"""InfCLLoss stands where open_clip's ClipLoss stood: its arguments, its values."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist

from infcl import InfCLLoss, SigLipLoss, inf_cl_loss
from tests.lib.open_clip_stub import import_open_clip
from tests.lib.ranks import rejected, run_ranks


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
    pairs = [(InfCLLoss(), open_clip.ClipLoss())]
    pairs += [(SigLipLoss(), open_clip.loss.SigLipLoss())] * (init_logit_bias is not None)
    for pair in pairs:
        ours, theirs = (loss(**model_out, output_dict=True) for loss in pair)
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs)
    features = model_out["image_features"], model_out["text_features"], model_out["logit_scale"]
    torch.testing.assert_close(InfCLLoss()(*features), open_clip.ClipLoss()(*features))


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
