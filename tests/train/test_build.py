"""Parts of a run, as the flags name them."""

from types import SimpleNamespace

import pytest

from infcl.config import BatchPlan, TrainConfig, resolve
from infcl.models import load_model_config
from infcl.parallel import init_parallel
from infcl.train.build import Inputs, build_loader
from tests.lib.ranks import rejected, run_ranks
from tests.lib.shard_files import write_shards
from tests.lib.specs import spec_of


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cuda", {}, "bf16"),  # autocast is the default on a GPU
        ("cuda", {"precision": "bf16"}, "bf16"),
        ("cuda", {"deepspeed_config": "zero2_fp16"}, "fp16"),
        ("cuda", {"precision": "fp32"}, None),
        ("cuda", {"precision": "fp32", "tile_dtype": "tf32"}, "tf32"),
        ("cpu", {"precision": "bf16"}, None),
    ],
)
def test_the_loss_multiplies_in_the_precision_of_the_towers_on_a_gpu(device, flags, expected):
    """float32 features would be multiplied as such, at a fortieth of the rate."""
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, **flags)
    assert resolve(config, device=device).tile_dtype == expected


def _rejection(rank, world_size, folders, means):
    config = TrainConfig(train_data=folders[rank], workers=0)
    tokenizer = SimpleNamespace(sha256="", context_length=8)
    parallel = init_parallel("cpu")
    spec = spec_of(config, parallel, BatchPlan(2, 1, 1))
    model = load_model_config("demo").with_preprocess({"mean": [means[rank]] * 3})
    return rejected(build_loader, Inputs(spec, model, tokenizer), parallel)


def test_ranks_that_find_other_data_or_preprocessing_are_reported(tmp_path):
    """Each would read by a plan of its own: some samples twice, others never, and not the same number of steps."""
    folders = [write_shards(tmp_path / name, sizes) for name, sizes in (("a", [2, 2]), ("b", [2, 2]))]
    (tmp_path / "b" / "00001.tar").unlink()
    printed = run_ranks(_rejection, 2, folders, [0.5, 0.4])
    assert printed[0] == printed[1] and "rank 1 on " in printed[0] and "samples 2 there, 4 here" in printed[0]
    assert "mean=(0.4, 0.4, 0.4)" in printed[0] and "mean=(0.5, 0.5, 0.5)" in printed[0]
