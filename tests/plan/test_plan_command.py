"""The planner's command line: what it prints, which flags and profiles it rejects, what it measures."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

from infcl.config import resolve
from infcl.models.config import load_model_config
from infcl.plan import measure
from infcl.plan.__main__ import main, setting_of
from infcl.plan.memory import memory_of
from infcl.plan.profile import load_gpu, load_link
from infcl.plan.setting import captions_of
from infcl.plan.timing import step_seconds

GIB = 2**30


def test_the_command_prints_parts_phases_and_the_largest_batch(capsys):
    words = "--model ViT-bigG-14 --deepspeed_config zero3_offload --precision bf16 --batch-size 64 --accum-freq 64"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert all(shown in printed for shown in ("host memory per GPU", "checkpoint", "a host, 8 GPUs"))
    words = "--model ViT-L-14 --gpus 32 --gpu a800-80g --global-batch-size 12582912 --deepspeed_config zero3"
    assert main([*words.split(), "--batch-size", "auto"]) == 0
    printed = capsys.readouterr().out
    for shown in ("feature gradients", "it fits", "overlaps loss", "samples/s", "largest global batch", "; ZeRO-3, "):
        assert shown in printed  # the paper's 12M samples


def test_a_plan_is_that_of_the_run_that_the_trainer_makes_of_the_flags(tmp_path):
    """Data may be elsewhere; preset, precision, batch and micro-batch follow from the trainer's own resolution."""
    (tmp_path / "own.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}')
    words = ["--model", "ViT-B-32", "--train-data", "/not/here/{0..9}.tar", "--tokenizer", "/not/here/spm.model"]
    words += ["--deepspeed_config", str(tmp_path / "own.json"), "--precision", "bf16", "--global-batch-size", "2400"]
    setting, spec = setting_of([*words, "--batch-size", "auto", "--lock-image"])
    assert spec == resolve(spec.flags, device="cuda", ranks=8)
    assert (setting.zero, setting.micro_batch, setting.num_micro_batches) == (2, 300, 1)
    assert setting.zero_optimization["reduce_bucket_size"] == 7 and setting.trainable < setting.parameters
    for flags, stage in ((["--deepspeed_config", "zero2"], 0), (["--precision", "bf16"], 1)):  # as a single rank is run
        alone = setting_of(["--model", "ViT-B-32", "--gpus", "1", "--global-batch-size", "1024", *flags])
        assert alone[0].zero == alone[1].zero_stage == stage


def test_as_many_graphs_as_fit_are_planned_where_that_is_asked_for(capsys):
    """The largest batch is that of one graph."""
    flags = "--model ViT-L-14 --gpus 1 --global-batch-size 1024 --batch-size 128 --caption-tokens 20"

    def planned(graphs: str) -> tuple[str, float, str]:
        assert main([*flags.split(), "--resident-micro-batches", graphs]) == 0
        said = capsys.readouterr().out
        assert "ZeRO-0 (stage 1" in said
        kept, rate = (re.search(form, said)[1] for form in (r"(\d+) cached micro-batch", r"(\d+) samples/s, "))
        return kept, float(rate), re.search(r"with this micro-batch: ([\d,]+)", said)[1]

    one, more = planned("1"), planned("auto")
    assert (one[0], more[0]) == ("1", "4") and one[2] == more[2]
    assert 1.07 < more[1] / one[1] < 1.14  # measured: 1.10


def test_packed_captions_are_planned_smaller_and_faster():
    flags = "--model ViT-B-32 --gpus 8 --batch-size 512 --accum-freq 8 --resident-micro-batches 1".split()
    whole, packed = (setting_of([*flags, *more])[0] for more in ([], ["--caption-tokens", "20"]))
    assert 1.2 < step_seconds(whole) / step_seconds(packed) < 1.8  # the text is 40% of its operations
    assert sum(memory_of(packed).values()) < sum(memory_of(whole).values())
    full, _ = setting_of([*flags, "--caption-tokens", "77"])
    assert step_seconds(full) == step_seconds(whole)  # captions that fill their places gain nothing by it
    assert sum(memory_of(full).values()) == sum(memory_of(whole).values())
    # and lose with torch's attention: longer rows, with a mask. Measured: 10 to 14% of a text tower
    full, whole = (setting.with_(attention="torch") for setting in (full, whole))
    assert 0.9 < step_seconds(whole) / step_seconds(full) < 0.99


def test_captions_that_training_does_not_pack_are_not_planned_packed():
    model = load_model_config("ViT-B-32")
    sees_all = dataclasses.replace(model, text_cfg=dataclasses.replace(model.text_cfg, no_causal_mask=True))
    assert captions_of(sees_all, None) == {"model": sees_all}
    with pytest.raises(ValueError, match="packed only for a causal text tower"):
        captions_of(sees_all, 20)


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("gpu", "hbm_gbs", True, "hbm_gbs is True: Input should be a valid number"),
        ("gpu", "link_gbs", 0, "link_gbs is 0.0, not a number above 0"),
        ("gpu", "hbm_gbs", float("inf"), "hbm_gbs is inf"),
        ("link", "gbs", -1, "gbs is -1"),
        ("link", "latency_us", None, "latency_us is None"),
    ],
)
def test_a_value_that_a_profile_cannot_have_is_named(kind, field, value, message, tmp_path, capsys):
    profile = {"gpu": load_gpu("h200"), "link": load_link("nic-400")}[kind]
    (tmp_path / "own.json").write_text(json.dumps({**vars(profile), field: value}))
    assert main([f"--{kind}", str(tmp_path / "own.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_measured_profile_says_what_of_it_was_not_measured(gpus, tmp_path, monkeypatch, capsys):
    """The measurements themselves are a GPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Chip")
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(measure, "_matmul", lambda device, dtype: 600e12 if dtype == torch.bfloat16 else 40e12)
    monkeypatch.setattr(measure, "_towers", lambda device, compiled: 300e12 + compiled * 60e12)
    monkeypatch.setattr(measure, "_loss", lambda device: 500e12)
    monkeypatch.setattr(measure, "host_factor", lambda: 1.251)
    monkeypatch.setattr(measure, "copy_rate", lambda source, target: 55 if source.type == "cpu" else 390.0)
    assert main(["--measure", str(tmp_path / "gpu.json")]) == 0
    reported = capsys.readouterr().out
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["host_factor"] == 1.25 and f"{tmp_path / 'gpu.json'}: name Chip, memory_gib 80.0, " in reported
    assert written["source"].endswith("estimated: host_factor" + ", link_gbs" * (gpus == 1))
    assert written["fp32_tflops"] == 40 and written["tower_efficiency"] == 0.5
    assert written["link_gbs"] == (25 if gpus == 1 else 390)
    assert written == vars(load_gpu(str(tmp_path / "gpu.json")))
