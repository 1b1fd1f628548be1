"""The planner's command line: what it prints, which flags and profiles it rejects, what it measures."""

import csv
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

from infcl.config import TrainConfig, make_parser
from infcl.models.config import load_model_config
from infcl.plan import measure
from infcl.plan.__main__ import main, parser, setting_of
from infcl.plan.memory import memory_of
from infcl.plan.profile import load_gpu, load_link
from infcl.plan.search import resolved
from infcl.plan.setting import captions_of
from infcl.plan.timing import samples_per_second
from tests.lib.checkout import ROOT

GIB = 2**30


def test_the_command_prints_parts_phases_and_advice(capsys):
    words = "--model ViT-bigG-14 --zero 3 --offload --precision bf16 --batch-size 64 --global-batch-size 32768"
    assert main(words.split()) == 0  # the trainer's spellings of two flags
    printed = capsys.readouterr().out
    assert all(shown in printed for shown in ("host memory per GPU", "checkpoint", "a host, 8 GPUs"))
    assert main("--model ViT-L-14 --gpus 32 --gpu a800-80g --global-batch 12288k --zero 3".split()) == 0
    printed = capsys.readouterr().out
    for shown in (
        "optimizer",
        "feature gradients",
        "it fits",  # the paper's 12M samples
        "overlaps loss",
        "samples/s",
        "largest global batch",
        "; ZeRO-3, ",
        "ZeRO-0 (",
    ):
        assert shown in printed


def test_as_many_graphs_as_fit_are_planned_where_that_is_asked_for(capsys):
    """Here and in the fastest settings; the largest batch is that of one graph."""
    flags = "--gpus 1 --global-batch 1024 --micro-batch-size 128 --caption-tokens 20"

    def planned(graphs: str) -> tuple[str, float, str]:
        assert main([*flags.split(), "--resident-micro-batches", graphs]) == 0
        said = capsys.readouterr().out
        kept, rate = (re.search(form, said)[1] for form in (r"(\d+) cached micro-batch", r"(\d+) samples/s, "))
        return kept, float(rate), re.search(r"with this micro-batch: ([\d,]+)", said)[1]

    one, more = planned("1"), planned("auto")
    assert (one[0], more[0]) == ("1", "4") and one[2] == more[2]
    assert 1.07 < more[1] / one[1] < 1.14  # measured: 1.10
    assert main([*flags.split(), "--resident-micro-batches", "auto"]) == 0
    fastest = capsys.readouterr().out.partition("fastest settings")[2]
    assert "micro-batch 128, ZeRO-0, 4 cached micro-batches" in fastest
    assert "micro-batch 256, ZeRO-0, 2 cached micro-batches" in fastest


def test_packed_captions_are_planned_smaller_and_faster():
    flags = "--model ViT-B-32 --gpus 8 --micro-batch-size 512".split()
    whole, packed = (setting_of(parser().parse_args([*flags, *more])) for more in ([], ["--caption-tokens", "20"]))
    assert 1.2 < samples_per_second(packed) / samples_per_second(whole) < 1.8  # the text is 40% of its operations
    assert sum(memory_of(packed).values()) < sum(memory_of(whole).values())
    full = setting_of(parser().parse_args([*flags, "--caption-tokens", "77"]))
    assert samples_per_second(full) == samples_per_second(whole)  # captions that fill their places gain nothing by it
    assert sum(memory_of(full).values()) == sum(memory_of(whole).values())
    # and lose with torch's attention: longer rows, with a mask. Measured: 10 to 14% of a text tower
    full, whole = (setting.with_(attention="torch") for setting in (full, whole))
    assert 0.9 < samples_per_second(full) / samples_per_second(whole) < 0.99


def test_captions_that_training_does_not_pack_are_not_planned_packed():
    model = load_model_config("ViT-B-32")
    sees_all = dataclasses.replace(model, text_cfg=dataclasses.replace(model.text_cfg, no_causal_mask=True))
    assert captions_of(sees_all, None) == {"model": sees_all}
    with pytest.raises(ValueError, match="packed only for a causal text tower"):
        captions_of(sees_all, 20)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--caption-tokens 78", "must lie in .1, 77."),
        ("--gpu a900", "no such profile .known: a10, a100-40g, a100-80g, a800-80g"),
        ("--link wet-string", "known: .*nic-200, nic-400, nic-800"),
        ("--gpu v100-32g", "v100-32g does not compute bf16: use --precision fp16 or fp32"),
        ("--gpus 12", "12 GPUs do not fill nodes of 8"),
        (
            "--global-batch 1000 --micro-batch-size 64",
            "1000 is no multiple of 8 data-parallel ranks x micro-batch 64; the next multiple is 1024",
        ),
        ("--sequence-parallel", "--tensor-parallel-size is 1"),
        ("--tensor-parallel-size 3", "8 GPUs are no multiple of tensor-parallel 3"),
        ("--micro-batch-size many", "must be a number greater than 0, or auto"),
        ("--sweep 8:16", "gpus=FIRST:LAST"),
        ("--model ViT-Z-99", "ViT-Z-99"),
        ("--gpus 0", "gpus 0 must be greater than 0"),
        ("--host-memory-gib nan", "--host-memory-gib nan must be a number above 0"),
        ("--resident-micro-batches 0", "resident-micro-batches 0 must be a number"),
        ("--sweep gpus=8:9", "write gpus=8:8 or gpus=8:16$"),
        ("--zero 0 --offload", "offloading the optimizer needs ZeRO stage >= 1"),
        ("--zero 0 --precision bf16", "--precision bf16 needs ZeRO stage >= 1"),
        ("--tensor-parallel-size 8 --model ViT-B-32", "8 does not divide the 12 heads of the image tower"),
        ("--tensor-parallel-size 2 --micro-batch-size 1", "2 does not divide micro-batch 1"),
        ("--tensor-parallel-size 16 --gpus 16", "16 spans nodes of 8 GPUs"),
        ("--measure none/gpu.json", "there is no folder none"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, message, capsys):
    assert main(flags.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_where_nothing_fits_that_is_said(capsys):
    assert main("--model ViT-bigG-14 --gpus 8 --global-batch 64m --micro-batch-size 256 --gpu a800-80g".split()) == 0
    assert "fastest settings for this batch\n  none fits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("gpu", "memory_gib", "80", "memory_gib is '80', not a number above 0"),
        ("gpu", "hbm_gbs", True, "hbm_gbs is True, not a number"),
        ("gpu", "link_gbs", 0, "link_gbs is 0, not a number above 0"),
        ("gpu", "pcie_gbs", float("nan"), "pcie_gbs is nan"),
        ("gpu", "hbm_gbs", float("inf"), "hbm_gbs is inf"),
        ("gpu", "name", 5, "name is 5, not str"),
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


@pytest.mark.parametrize("path", sorted((ROOT / "infcl" / "plan" / "profiles").glob("*/*.json")), ids=lambda p: p.stem)
def test_a_shipped_profile_says_which_figures_are_estimated(path):
    profile = (load_gpu if path.parent.name == "gpus" else load_link)(path.stem)
    assert "estimated" in profile.source or "measured" in profile.source


def test_an_older_profile_is_still_read():
    """It has a share of usable memory, which no profile sets any more, and no rate of FP32."""
    assert load_gpu(str(ROOT / "docs" / "results" / "h200_measured.json")).fp32_tflops == 50


@pytest.mark.parametrize(
    ("flags", "stage"),
    [([], 0), (["--zero", "2"], 0), (["--precision", "bf16"], 1), (["--zero", "3"], 3), (["--offload"], 1)],
)
def test_a_single_rank_is_planned_as_it_is_run(flags, stage):
    words = ["--model", "ViT-L-14", "--gpus", "1", "--gpus-per-node", "8", "--global-batch", "1024", *flags]
    for size in ("128", "auto"):
        assert resolved(setting_of(parser().parse_args([*words, "--micro-batch-size", size]))).zero == stage


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_sweep_shards_from_two_ranks_on_wherever_it_begins(gpus, capsys):
    words = (
        f"--model ViT-L-14 --gpu h200 --gpus {gpus} --global-batch {1024 * int(gpus)} --micro-batch-size 128 --zero 2"
    )
    assert main([*words.split(), "--sweep", "gpus=1:4"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [float(row["ZeRO traffic"]) > 0 for row in rows[:3]] == [False, True, True]
    assert main(words.split()) == 0
    assert ("ZeRO-0 (stage 2 over one rank)" if gpus == "1" else "; ZeRO-2, ") in capsys.readouterr().out


def test_the_defaults_are_the_trainers():
    """The same flags have the same defaults; the preset that the trainer takes is that of ZeRO-1."""
    trainer = make_parser()
    for flag in ("grad_checkpointing", "compile_blocks", "resident_micro_batches", "pixel_cache_gb", "attention",
                 "loss", "tensor_parallel_size", "sequence_parallel"):  # fmt: skip
        assert parser().get_default(flag) == trainer.get_default(flag), flag
    assert parser().get_default("zero") == 1 and trainer.get_default("deepspeed_config") == "zero1"
    setting = setting_of(parser().parse_args(["--micro-batch-size", "64"]))
    fields = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert setting.checkpointing == fields["grad_checkpointing"] and setting.loss == fields["loss"]
    assert setting.attention == fields["attention"] and setting.ring == "auto"
    assert setting.pixels == "host" and setting.tensor_parallel == fields["tensor_parallel_size"]
