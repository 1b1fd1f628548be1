"""What a ZeRO preset and the flags become: DeepSpeed's config, how it is described, and which presets are rejected."""

import dataclasses
import json
import re

import pytest

from infcl.config import BatchPlan, resolve
from infcl.config.precision import PRECISIONS
from infcl.config.preset import read_preset
from infcl.plan.memory import bucket_bytes
from tests.lib.checkout import ROOT
from tests.lib.engine_steps import TOY, engine_steps, settings
from tests.lib.ranks import run_ranks
from tests.lib.specs import engine_of, setting
from tests.lib.step_oracle import ToyCLIP


def preset_file(tmp_path, content) -> str:
    path = tmp_path / "preset.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("{", {}, "not JSON"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, {}, "offload_optimizer is 'cpu'"),
        ({"bf16": {"enabled": "auto"}}, {}, 'enabled is "auto"'),
        ({"bf16": {"enabled": "false"}}, {}, "bf16.enabled.bool is 'false': Input should be a valid boolean"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, {}, "cpu_offload is DeepSpeed's old name"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, {}, "round_robin.*leave it out"),
        ({"train_batch_size": 8}, {}, "--batch-size and --accum-freq"),
        ({"gradient_clip": 1.0}, {}, "unknown key 'gradient_clip'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, {}, "zero3_offload"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "both bf16 and fp16"),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, {"precision": "fp32"}, "contradicts"),
        ({"zero_optimization": {"stage": 0}}, {"precision": "bf16"}, "stage >= 1"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}, "offloading .* needs ZeRO stage >= 1"),
    ],
)
def test_a_wrong_preset_is_rejected_with_the_fix(tmp_path, content, flags, message):
    with pytest.raises(ValueError, match=message):
        read_preset(settings("zero1", deepspeed_config=preset_file(tmp_path, content), **flags), "cpu")


def test_what_deepspeed_does_across_tensor_parallel_ranks_is_rejected(tmp_path):
    """Trained with hpZ, T = 2 x D = 2 had other losses than T = 1 (5.130 instead of 4.124), without a word."""
    keys = {"zero_hpz_partition_size": (2, 1), "zero_quantized_gradients": (True, False)}
    for key, (wrong, right) in (keys | {"zero_quantized_weights": (True, False)}).items():
        path = preset_file(tmp_path, {"zero_optimization": {"stage": 3, key: wrong}})
        config = settings("", deepspeed_config=path)
        read_preset(config, "cpu")
        split = dataclasses.replace(config, tensor_parallel_size=2)
        with pytest.raises(ValueError, match=f"--tensor-parallel-size 2 with {key} {json.dumps(wrong)}.* leave it out"):
            read_preset(split, "cpu")
        preset_file(tmp_path, {"zero_optimization": {"stage": 3, key: right}})
        read_preset(split, "cpu")


@pytest.mark.parametrize(
    ("preset", "precision", "alone"),
    [("zero0", "fp32", 0), ("zero1", "fp32", 0), ("zero2", "amp_bf16", 0), ("zero3", "fp32", 3), ("zero1", "bf16", 1),
     ("zero2_bf16", None, 2), ("zero3_offload", "fp32", 3)],
)  # fmt: skip
def test_a_single_rank_shards_nothing_where_nothing_is_lost_by_it(preset, precision, alone):
    config = settings(preset, precision=precision)
    one, two = (resolve(config, device="cuda", ranks=ranks) for ranks in (1, 2))
    assert one.zero_stage == alone and two.zero_stage == one.asked_stage == int(preset[4])


def test_a_single_rank_keeps_a_stage_that_does_what_stage_0_does_not(tmp_path):
    for more in ({"offload_optimizer": {"device": "cpu"}}, {"data_types": {"grad_accum_dtype": "bf16"}}):
        preset = {"zero_optimization": {"stage": 1}}
        (preset if "data_types" in more else preset["zero_optimization"]).update(more)
        config = settings("", deepspeed_config=preset_file(tmp_path, preset))
        assert resolve(config, device="cpu").zero_stage == 1
        run_ranks(engine_steps, 1, TOY, config.deepspeed_config)


@pytest.mark.parametrize(
    ("preset", "within", "across"), [("zero1", False, True), ("zero2_bf16", False, True), ("zero3", True, True)]
)
def test_whether_reductions_overlap_follows_the_hosts_where_a_preset_leaves_it_open(preset, within, across, tmp_path):
    for hosts, expected_value in ((1, within), (2, across)):
        assert read_preset(settings(preset), "cpu", hosts)[0]["zero_optimization"]["overlap_comm"] is expected_value
        for said in (True, False):
            own = preset_file(tmp_path, {"zero_optimization": {"stage": 1, "overlap_comm": said}})
            read = read_preset(settings("", deepspeed_config=own), "cpu", hosts)[0]
            assert read["zero_optimization"]["overlap_comm"] is said


def bucket_of_deepspeed(rank, world_size, path):
    from infcl.parallel import init_parallel

    config = settings("", deepspeed_config=path, precision="fp32")
    engine = engine_of(ToyCLIP(), config, init_parallel("cpu"), BatchPlan(world_size, 1, 4))
    return engine.engine.optimizer.reduce_bucket_size


def rejected_by_deepspeed(rank, world_size, path):
    with pytest.raises(ValueError) as rejected:
        bucket_of_deepspeed(rank, world_size, path)
    return str(rejected.value)


def test_a_value_that_deepspeed_rejects_is_reported_in_one_line_with_the_preset(tmp_path):
    path = preset_file(tmp_path, {"zero_optimization": {"stage": 1, "stages": 2}})
    (message,) = run_ranks(rejected_by_deepspeed, 1, path)
    assert re.fullmatch(rf"--deepspeed_config {path}: .*; stages; Extra inputs are not permitted.*", message)


@pytest.mark.parametrize(
    ("zero", "elements"),
    [
        ({"stage": 3}, 50_000_000),  # of which the engine has up to three
        ({"stage": 3, "reduce_bucket_size": 1234}, 1234),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, 500_000_000),
    ],
)
def test_a_preset_without_buckets_gets_deepspeeds_but_where_the_engine_reduces_them(tmp_path, zero, elements):
    path = preset_file(tmp_path, {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False})
    assert run_ranks(bucket_of_deepspeed, 2, path) == [elements] * 2
    shown = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())["zero_optimization"]
    assert shown["reduce_bucket_size"] == 50_000_000
    offloads = ("optimizer",) if "offload_optimizer" in zero else ()
    planned, given = (
        bucket_bytes(
            setting(trainable=10**9, zero_optimization=options, zero=zero["stage"], precision="fp32", offloads=offloads)
        )
        for options in (zero, zero | {"reduce_bucket_size": elements})
    )
    assert planned == given


def test_fp16_on_a_cpu_without_it_is_rejected_by_the_flag_that_asks_for_it(monkeypatch):
    monkeypatch.setattr("infcl.config.preset.cpu_computes_fp16", lambda: False)
    with pytest.raises(ValueError, match="--precision fp16: this CPU has no .* fp32 or bf16"):
        read_preset(settings("zero1", precision="fp16"), "cpu")
    with pytest.raises(ValueError, match=r"--deepspeed_config .*zero2_fp16.json: this CPU has no"):
        read_preset(settings("zero2_fp16"), "cpu")
    monkeypatch.setattr("infcl.config.preset.cpu_computes_fp16", lambda: True)
    for device in ("cpu", "cuda"):
        assert read_preset(settings("zero2_fp16"), device)[1] == PRECISIONS["fp16"]


def test_without_a_flag_the_precision_follows_the_device():
    found = [read_preset(settings(name), device)[1] for name in ("zero1", "zero2_bf16") for device in ("cpu", "cuda")]
    assert list(map(str, found)) == ["fp32", "amp_bf16", "bf16", "bf16"]
