"""Parts of a run, as the flags name them."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from infcl.checkpoint.run_folder import RunFolder
from infcl.config import BatchPlan, TrainConfig, resolve
from infcl.evaluate.load import load_tokenizer
from infcl.models import load_model_config
from infcl.parallel import init_parallel
from infcl.train.build import Inputs, build_loader, build_tokenizer_and_model_config
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


def _rejection(rank, world_size, folders):
    config = TrainConfig(train_data=folders[rank], workers=0, max_missing_shards=0.5)
    tokenizer = SimpleNamespace(sha256="", context_length=8)
    parallel = init_parallel("cpu")
    spec = spec_of(config, parallel, BatchPlan(2, 1, 1))
    return rejected(build_loader, Inputs(spec, load_model_config("demo"), tokenizer), parallel)


def test_ranks_that_find_other_data_are_reported(tmp_path):
    """Each would read by a plan of its own: some samples twice, others never, and not the same number of steps."""
    folders = [write_shards(tmp_path / name, sizes) for name, sizes in (("a", [2, 2]), ("b", [2, 2]))]
    braces = [f"{folder}/{{00000..00001}}.tar" for folder in folders]
    (tmp_path / "b" / "00001.tar").unlink()
    printed = run_ranks(_rejection, 2, braces)
    assert printed[0] == printed[1] and "rank 1 on " in printed[0] and "samples 2 there, 4 here" in printed[0]


def test_a_run_from_before_captions_were_repaired_keeps_its_ids(tokenizer_model, tmp_path):
    old, caption = RunFolder(tmp_path / "old"), ["\u201cThe Work\u201d &amp; \u2018you\u2019"]
    old.root.mkdir()
    config = TrainConfig(model="demo", tokenizer=str(tokenizer_model), train_data="x", logs=str(tmp_path), name="old")
    new, cfg = build_tokenizer_and_model_config(config)
    fields = cfg.to_dict()
    assert fields["text_cfg"].pop("tokenizer_kwargs") == {"clean": "canonicalize"}
    old.model_config.write_text(json.dumps(fields))
    for resume, name in (("latest", "old"), (str(old.checkpoints / "step_00000001"), "new")):
        resumed = dataclasses.replace(config, resume=resume, name=name)
        tokenizer, model_config = build_tokenizer_and_model_config(resumed)
        assert model_config.to_dict() == fields
        assert tokenizer(caption).tolist() == load_tokenizer(tokenizer_model, model_config)(caption).tolist()
        assert tokenizer(caption).tolist() != new(caption).tolist()
    assert build_tokenizer_and_model_config(dataclasses.replace(config, resume="latest", overwrite=True))[1] == cfg
    old.model_config.write_text(cfg.to_json())
    tokenizer, model_config = build_tokenizer_and_model_config(dataclasses.replace(config, resume="latest"))
    assert model_config == cfg and tokenizer(caption).tolist() == new(["The Work & you"]).tolist()
