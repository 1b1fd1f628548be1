"""Flags that cannot fit are rejected with what would; --batch-size auto takes the most that fits."""

import dataclasses
import json
import re

import pytest
import torch

from infcl.config import parse_args, resolve
from infcl.models import CLIP, load_model_config
from infcl.plan.fit import Fit
from infcl.plan.setting import parameter_counts
from tests.lib.checkout import ROOT
from tests.lib.entry import command, forked
from tests.lib.fitting import GIB, SYNTHETIC, fit, under
from tests.lib.ranks import run_ranks


def test_what_takes_all_memory_to_the_last_byte_fits_and_a_byte_more_does_not():
    question = fit("--batch-size", "64", gib=80)
    peak = question.parts(question.spec)["peak"]
    dataclasses.replace(question, capacity=peak).check()
    with pytest.raises(ValueError, match="ViT-L-14 needs"):
        dataclasses.replace(question, capacity=peak - 1).check()


@pytest.mark.parametrize(
    ("flags", "gib", "proposed"),
    [
        (["--batch-size", "1024"], 80, r"Try --batch-size 256 --accum-freq 4 \([\d.]+ GiB\) or --skip"),
        (["--global-batch-size", "8192", "--batch-size", "1024"], 80, r"Try --batch-size 256 \("),
        (["--batch-size", "8"], 5, r"--deepspeed_config zero3 \("),
        (["--batch-size", "8"], 1, "use more GPUs, offloading or --skip-memory-check"),
    ],
)
def test_a_run_that_cannot_fit_is_rejected_with_a_suggestion(flags, gib, proposed):
    question = fit(*flags, gib=gib)
    with pytest.raises(ValueError, match=proposed) as rejected:
        question.check()
    assert "ViT-L-14 needs" in str(rejected.value) and f"{gib:.1f} GiB is available" in str(rejected.value)
    assert "--skip-memory-check" in str(rejected.value)


def test_a_proposed_preset_is_asked_for_with_the_precision_it_was_planned_in_and_without_the_other_s_offload():
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    preset = {"zero_optimization": zero, "bf16": {"enabled": True}}
    question = under(fit("--batch-size", "8", gib=4), precision="bf16", preset=preset)
    with pytest.raises(ValueError, match=r"--deepspeed_config zero3 --precision bf16 \((\d\.\d) GiB") as rejected:
        question.check()
    printed = float(re.search(r"\((\d\.\d) GiB\)", str(rejected.value))[1])
    size = int(re.search(r"--batch-size (\d+)", str(rejected.value))[1])
    shipped = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    proposed = under(question, preset=shipped).spec
    proposed = proposed.change(batch_size=size, accum_freq=8 // size, grad_checkpointing=True)
    assert question.parts(proposed)["peak"] / GIB == pytest.approx(printed, abs=0.05)


def test_a_small_model_on_cpus_is_not_rejected_for_buckets_that_it_leaves_empty():
    cfg = load_model_config("demo")
    with torch.device("meta"):
        counts = parameter_counts(CLIP(cfg))
    config = parse_args([*SYNTHETIC, "--model", "demo", "--batch-size", "2"])
    preset = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    spec = resolve(config, device="cuda", ranks=32)
    question = under(Fit(spec, cfg, counts, 1 * GIB), precision="fp32", preset=preset)
    with pytest.raises(ValueError, match="gradient buckets 3.7 GiB"):
        question.check()
    under(question, device="cpu").check()


def test_auto_takes_the_largest_size_that_fits_and_divides():
    question = fit("--global-batch-size", "65536", "--batch-size", "auto", gib=80)
    chosen = question.choose()
    assert question.parts(chosen)["peak"] <= 0.9 * 80 * GIB
    larger = chosen.change(batch_size=2 * chosen.flags.batch_size)
    assert question.parts(larger)["peak"] > 0.9 * 80 * GIB
    more = fit("--global-batch-size", "65536", "--batch-size", "auto", "--grad-checkpointing", gib=80).choose()
    assert more.flags.batch_size > chosen.flags.batch_size


@pytest.mark.parametrize(("gib", "host"), [(1, 1000), (80, 0.1)])
def test_the_check_can_be_skipped_with_auto_too(gib, host):
    """As what rejects says, be it for the GPU or for the host."""
    flags = ("--global-batch-size", "65536", "--batch-size", "auto")
    rejected = dataclasses.replace(fit(*flags, gib=gib), host=host * GIB)
    with pytest.raises(ValueError, match="or --skip-memory-check"):
        rejected.choose()
    skipped = dataclasses.replace(fit(*flags, "--skip-memory-check", gib=gib), host=host * GIB)
    assert skipped.choose().flags.batch_size == (1 if gib == 1 else fit(*flags, gib=80).choose().flags.batch_size)


def test_the_trainer_takes_auto(demo_folder, tmp_path):
    flags = command(demo_folder, tmp_path, "--dry-run", "--global-batch-size", "48", "--batch-size", "auto")
    flags[flags.index("--accum-freq") + 1] = "1"
    result = forked(flags, 1)
    assert result.returncode == 0, result.stderr
    assert "48 samples per step = 1 data-parallel rank x 1 micro-batch (--accum-freq) x 48" in result.stdout


def test_the_trainer_rejects_what_no_host_can_hold_and_can_be_overruled(tmp_path):
    flags = ["pretrain_clip.py", *SYNTHETIC, "--batch-size", "65536", "--dry-run", "--logs", str(tmp_path)]
    result = forked(flags, 1)
    assert result.returncode == 2 and result.stderr.count("error:") == 1 and "Try --batch-size" in result.stderr
    assert forked([*flags, "--skip-memory-check"], 1).returncode == 0


def chosen_beside_another(rank, world_size, gib):
    """(--batch-size auto's choice, or its rejection) of a rank whose device has `gib[rank]`."""
    from unittest import mock

    from infcl.parallel import init_parallel
    from infcl.train import fit
    from infcl.train.build import resolve_inputs

    config = parse_args([*SYNTHETIC, "--batch-size", "auto", "--global-batch-size", "2048"])
    with mock.patch.object(fit, "memory_of_device", lambda parallel: float(gib[rank] * GIB)):
        try:
            parallel = init_parallel("cpu")
            return fit.fit_to_memory(resolve_inputs(config, parallel), parallel).spec.flags.batch_size
        except ValueError as error:
            return str(error)


def test_ranks_of_different_memory_take_the_micro_batch_of_the_least():
    """With other micro-batches each, they would wait for one another."""
    least = run_ranks(chosen_beside_another, 2, (40, 40))
    assert run_ranks(chosen_beside_another, 2, (80, 40)) == least and least[0] == least[1] > 0
    assert run_ranks(chosen_beside_another, 2, (80, 80))[0] > least[0]
    assert all("1.0 GiB is available" in rejection for rejection in run_ranks(chosen_beside_another, 2, (80, 1)))
