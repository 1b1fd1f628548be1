"""open_clip_train with our loss takes the steps that it takes with its own and --local-loss --gather-with-grad."""

import argparse
import json
import sys
import types
from unittest import mock

import pytest
import torch

from tests.lib.open_clip_stub import import_open_clip
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import worst_error

STEPS, ROWS = 20, 4
MODEL = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _is_installed():
    import_open_clip()
    pytest.importorskip("open_clip_train.params")


def train(rank: int, world_size: int, folder: str, ours: bool, flags: tuple[str, ...]):
    """Weights after open_clip_train.main.main, of rank 0."""
    sys.modules.setdefault("pandas", types.ModuleType("pandas"))  # for tables of images only
    open_clip = import_open_clip()
    from open_clip_train import data, main

    from infcl.integrations.open_clip import use_ring_loss

    open_clip.add_model_config(f"{folder}/tiny.json")

    wrapper = torch.nn.parallel.DistributedDataParallel

    def without_devices(model, device_ids, **options):  # open_clip names a device, which torch takes on GPUs only
        return wrapper(model, **options)

    def sample(dataset, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 49000, (8,), generator=generator)
        tokens[-1] = 49407
        return torch.randn(3, 16, 16, generator=generator), tokens

    name = "_".join(("ours" if ours else "theirs", *flags)).replace("-", "")
    arguments = "--model tiny --dataset-type synthetic --device cpu --dist-backend gloo --precision fp32 --workers 0"
    arguments += f" --train-num-samples {STEPS * ROWS * world_size} --batch-size {ROWS} --epochs 1 --warmup 3 --lr 0.01"
    arguments += f" --eps 1e-3 --logs {folder} --name {name} --zeroshot-frequency 0 --val-frequency 0"
    with (
        mock.patch.object(data.SyntheticDataset, "__getitem__", sample),
        mock.patch.object(torch.distributed, "init_process_group"),  # the ranks of the tests have one
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", without_devices),
        mock.patch.object(main, "create_loss", main.create_loss),
    ):
        if ours:
            use_ring_loss()
        main.main([*arguments.split(), *flags])
    if rank == 0:
        saved = torch.load(f"{folder}/{name}/checkpoints/epoch_1.pt", weights_only=False)
        return {key.removeprefix("module."): value for key, value in saved["state_dict"].items()}


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--siglip",)])
def test_twenty_steps_equal_those_of_its_own_loss(tmp_path, flags):
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL | ({"init_logit_bias": -10} if flags else {})))
    theirs = run_ranks(train, 2, str(tmp_path), False, (*flags, "--local-loss", "--gather-with-grad"))[0]
    ours = run_ranks(train, 2, str(tmp_path), True, flags)[0]
    assert worst_error(ours, {key: value.double() for key, value in theirs.items()}) < 3e-5  # both are float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": True}, "--distill-model: .*; pretrain_clip.py of infcl distils"),
        ({"model": "coca_ViT-B-32"}, "coca_ViT-B-32"),
    ],
)
def test_losses_with_another_term_are_rejected(changes, message):
    from infcl.integrations.open_clip import create_loss

    given = {"distill": False, "model": "ViT-B-32", "siglip": False, "horovod": False, "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match=message):
        create_loss(argparse.Namespace(**given | changes))
