"""Flags: open_clip's names, one clear message for each usage error, and arithmetic in one place."""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import traceback

import pytest

from infcl.config import BatchPlan, TrainConfig, make_parser, option_of, parse_args, settings_of, total_steps
from infcl.config.open_clip_flags import EQUIVALENTS, notes_on_ignored
from infcl.config.preset import read_preset
from infcl.config.redaction import redact_output, redacted
from tests.lib.checkout import ROOT

SYNTHETIC = ["--dataset-type", "synthetic", "--train-num-samples", "64"]

# defaults that are not open_clip's
OWN_DEFAULTS = {"dataset_type", "device", "model", "precision", "pretrained", "pretrained_image", "report_to"}
OWN_DEFAULTS |= {"aug_cfg", "image_mean", "image_std", "wandb_project_name"}  # the first three: empty, not None
OWN_DEFAULTS |= {"warmup", "workers"}  # by the length of the run, by the cores


def test_flags_that_open_clip_has_keep_its_defaults():
    params = pytest.importorskip("open_clip_train.params")
    theirs, ours = vars(params.parse_args(["--model", "ViT-B-32"])), dataclasses.asdict(parse_args(SYNTHETIC))
    shared = (theirs.keys() & ours.keys()) - OWN_DEFAULTS - {"train_num_samples"}
    assert len(shared) == 41 and {n: ours[n] for n in shared} == {n: theirs[n] for n in shared}


def test_train_data_of_several_values_is_one_list_of_sources(tmp_path):
    argv = ["--train-data", "a/{0..3}.tar", "b", "@urls.txt", "--tokenizer", __file__, "--dataset-type", "auto"]
    config = parse_args(argv)
    assert (config.train_data, config.dataset_type) == ("a/{0..3}.tar::b::@urls.txt", "webdataset")
    assert parse_args([*argv[:1], "a.csv", "b.TSV", *argv[4:]]).dataset_type == "csv"
    for pattern in ("shards/0000?.tar", "shards/[0-3].tar", "shards/*.tar"):  # the data layer expands them
        assert parse_args([*argv[:1], pattern, *argv[4:]]).train_data == pattern
    (tmp_path / "urls").write_text("a.tar")
    assert parse_args([*argv[:1], f"@{tmp_path}/urls", *argv[4:]]).train_data == f"@{tmp_path}/urls"


def test_the_flags_equal_the_golden_list():
    """A new, renamed or removed flag is a change that users see: write it into tests/golden/flags.txt as well."""
    flags = [option_of(field.name) for field in dataclasses.fields(TrainConfig)]
    assert flags == (ROOT / "tests/golden/flags.txt").read_text().split()


def test_the_help_has_every_flag_in_its_group(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(option_of(field.name) in text for field in dataclasses.fields(TrainConfig))
    assert all(f"\n{group}:\n" in text for group in ("data", "model", "loss", "optimisation", "system", "run"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--zero-stage", "2"], r"--zero-stage 2 \(--zero-stage, here: --deepspeed_config zero0 to zero3\)"),
        (["--log_dir", "runs"], r"--log_dir runs \(--log_dir, here: --logs\)"),
        (["--batch_size", "3"], r"--batch_size 3 \(--batch_size: did you mean --batch-size\?\)"),
        (["--pretrained", "openai"], "openai: no such file or folder .*or open_clip:TAG, whose weights"),
        (["--tokenizer", "ViT-B-32"], "no such file or folder .*or open_clip:ViT-B-32 for CLIP's own"),
        (["--deepspeed_config", "zero9"], r"no such file or folder \(it takes a name in ds_configs"),
        (["--report-to", "all"], "--report-to all: wandb is not installed"),
        (["--loss", "clip", "--tile-dtype", "bf16"], "--tile-dtype bf16 is for --loss inf_cl and siglip"),
        (["--workers", "-2"], "-2 must be at least 0, or auto"),
        (["--global-batch-size", "64", "--accum-freq", "2"], "leave one of them out"),
        (["--steps", "64", "--epochs", "2"], "--steps 64 and --epochs 2: leave one of them out"),
        (["--duplicates", "mask:pixels"], "--duplicates mask:pixels: give negative, mask or positive, also with"),
        (["--lr-scaling", "sqrt:0"], "--lr-scaling sqrt:0: give none, sqrt or linear, the last two also with"),
        (["--duplicates", "mask", "--loss", "disco"], "--duplicates mask is for --loss inf_cl and siglip, not disco"),
        (["--captions-per-image", "2", "--loss", "siglip"], "--captions-per-image 2 and --negatives-key are for"),
        (["--captions-per-image", "2", "--duplicates", "mask"], "captions of one image its positives, which"),
        (["--negatives-key", "hard"], "--dataset-type synthetic has no data for --duplicates, --negatives-key"),
        (["--false-negative-margin", "0.1", "--loss", "clip"], "margin 0.1 is for --loss inf_cl and siglip"),
        (["--matryoshka-weights", "1"], "--matryoshka-weights needs --matryoshka-widths"),
        (["--distill-model", "infcl", "--teacher-key", "t:8"], "infcl and --teacher-key t:8: leave one of them out"),
        (["--distill-model", "ViT-B-16"], "ViT-B-16 is no folder with weights: add --distill-pretrained"),
        (["--distill-pretrained", "open_clip:x"], "open_clip:x: it is the weights file or tag of --distill-model"),
        (["--distill-model", "ViT-B-16", "--distill-pretrained", "infcl"], "infcl: .*given as --distill-model alone"),
        (["--distill-model", "infcl"], "--dataset-type synthetic has no captions for --distill-model"),
        (["--teacher-key", "t:0"], "--teacher-key t:0: give NAME:N"),
        (
            ["--teacher-key", "t:8", "--dataset-type", "csv", "--train-data", "infcl"],
            "no members for --teacher-key: it needs shards",
        ),
        (
            ["--train-data-upsampling-factors", "1::2", "--dataset-type", "streaming", "--train-data", "a::b"],
            "upsampling-factors needs --dataset-type webdataset, not streaming",
        ),
        (["--teacher-scale", "9"], "--teacher-scale and --distill-weight need a teacher"),
        (["--teacher-scale", "20000"], r"--teacher-scale 20000.0 must lie in \(0, 10000\]: it multiplies cosines"),
        (["--batch-size", "auto"], "--batch-size auto needs --global-batch-size"),
        (["--batch-size", "many"], "invalid int value: 'many'"),
        (["--name", os.fsdecode(b"a\xff")], "--name 'a.udcff' is not UTF-8"),
        (["--lr", "-1"], "--lr -1.0 must be greater than 0"),
        (["--grad-clip-norm", "0"], "leave it out for none"),
        (["--wd", "nan"], "--wd nan must be a finite number"),
        (["--seed", str(2**63)], r"must lie in \[0, 2\*\*63\)"),
        (["--lock-image", "--lock-text"], "lock one, or add"),
        (["--lock-image-unlocked-groups", "2"], "needs --lock-image"),
        (["--lr-scheduler", "const-cooldown"], "needs --epochs-cooldown"),
        (["--epochs-cooldown", "2"], "no meaning with --lr-scheduler cosine"),
        (
            ["--lr-scheduler", "const-cooldown", "--epochs-cooldown", "1", "--lr", "1e-3", "--lr-cooldown-end", "1"],
            "--lr-cooldown-end 1, the learning rate at the end, is above --lr 0.001",
        ),
        (["--pixel-cache-gb", "much"], "--pixel-cache-gb much is neither a number of at least 0 nor auto"),
        (["--resident-micro-batches", "0"], "--resident-micro-batches 0 is neither a number above 0 nor auto"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0 must be greater than 0"),
        (["--tensor-parallel-size", "4", "--batch-size", "9"], "does not divide --batch-size 9: .* Use 8 or 12"),
        (["--tensor-parallel-size", "4", "--batch-size", "3"], "does not divide --batch-size 3: .* Use 4$"),
        (["--opt", "adafactor", "--tensor-parallel-size", "2"], "needs full matrices"),
        (["--aug-cfg", "crop=1"], "--aug-cfg takes scale, ratio, hflip, color_jitter.*, not crop"),
        (["--aug-cfg", "scale=("], "is not KEY=VALUE"),
        (["--json-text-key-probs", "1", "nan"], "--json-text-key-probs nan must be a finite number"),
    ],
)
def test_a_wrong_flag_is_rejected_with_the_value_and_the_fix(flags, message, monkeypatch):
    monkeypatch.setattr("infcl.config.checks._is_installed", lambda package: False)
    with pytest.raises(ValueError, match=message):
        parse_args([*SYNTHETIC, *flags])


@pytest.mark.parametrize(
    ("url", "has_password"),
    [
        ("pipe:curl -s https://me:hunter2@host/{00..03}.tar", True),
        ("https://hunter2@host/{00..03}.tar", True),
        ("s3://me:hunter2@bucket/0.tar", True),
        ("s3://me@bucket/0.tar", False),
        ("hdfs://me@host:8020/0.tar", False),
        ("pipe:ssh me@host cat /data/0.tar", False),
        ("https://host:8080/a@b/0.tar", False),
        ("https://host/0.tar?user=me@host&tokens=77", False),
        ("pipe:curl -s --user-agent a:b https://host/0.tar", False),
    ],
)
def test_a_password_in_a_url_is_rejected_and_not_printed(url, has_password):
    with pytest.raises(ValueError) if has_password else contextlib.nullcontext() as rejected:
        parse_args(["--train-data", url, "--tokenizer", __file__])
    if has_password:
        assert "--train-data holds a password" in str(rejected.value) and "hunter2" not in str(rejected.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--train-data is missing: .*; `make train` runs the demo"),
        ("--train-data /no/such/folder --tokenizer x", "/no/such/folder: no such file or folder"),
        ("--train-data {0..3}.tar", "--tokenizer is missing"),
        ("--train-data a.tar b.csv", "--train-data a.tar::b.csv mixes tables and shards"),
        ("--dataset-type webdataset --train-data /data/Pairs.CSV", "Pairs.CSV is a table: add --dataset-type csv"),
        ("--dataset-type synthetic", "needs --train-num-samples"),
    ],
)
def test_missing_data_is_rejected_before_anything_is_loaded(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(flags.split())


def test_a_preset_is_named_from_any_folder_and_another_file_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse_args(SYNTHETIC)
    assert config.deepspeed_config == "zero1" and read_preset(config, "cpu")[0]["zero_optimization"]["stage"] == 1
    assert settings_of(config)["--deepspeed_config"].startswith("sha256 ")
    with pytest.raises(ValueError, match=r"ds_configs/zero1.json: no such file or folder \(it takes a name"):
        parse_args([*SYNTHETIC, "--deepspeed_config", "ds_configs/zero1.json"])
    (tmp_path / "zero1.json").write_text("{}")
    assert read_preset(parse_args([*SYNTHETIC, "--deepspeed_config", "zero1.json"]), "cpu")[0] == {}


def test_batch_arithmetic():
    plan = BatchPlan(dp_size=8, num_micro_batches=4, micro_batch_size=128)
    assert (plan.rank_batch_size, plan.global_batch_size) == (512, 4096)
    assert "4,096 samples per step = 8 data-parallel ranks x 4 micro-batches" in str(plan)
    assert "2 samples per step = 1 data-parallel rank x 1 micro-batch (--accum-freq) x 2" in str(BatchPlan(1, 1, 2))
    assert total_steps(parse_args([*SYNTHETIC, "--epochs", "3"]), 10) == 30
    assert total_steps(parse_args([*SYNTHETIC, "--steps", "7"]), 10) == 7
    assert BatchPlan.of(parse_args([*SYNTHETIC, "--batch-size", "16", "--accum-freq", "3"]), 4) == BatchPlan(4, 3, 16)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "plan"), [(32, 128, (32, 1, 128)), (8, 96, (8, 8, 64)), (64, 128, (64, 1, 64))]
)
def test_a_global_batch_is_kept_whatever_the_ranks(ranks, batch_size, plan):
    config = parse_args([*SYNTHETIC, "--global-batch-size", "4096", "--batch-size", str(batch_size)])
    assert BatchPlan.of(config, ranks) == BatchPlan(*plan)
    with pytest.raises(ValueError, match="4096 cannot be shared by 24 ranks"):
        BatchPlan.of(config, 24)


@pytest.mark.parametrize(
    ("global_batch", "batch_size", "parts", "words"),
    [
        (8 * 101, 50, 1, ("micro-batches of 1, not --batch-size 50", "multiple of 400")),
        (8 * 60, 30, 4, ("of 20, not --batch-size 30", "samples of 4 ranks", "of 224")),
        (8 * 56, 30, 4, None),
        (800, 50, 1, None),
        (8, 50, 1, None),  # a share below 50
    ],
)
def test_a_micro_batch_that_becomes_smaller_than_asked_is_reported(global_batch, batch_size, parts, words):
    config = parse_args([*SYNTHETIC, "--global-batch-size", str(global_batch), "--batch-size", str(batch_size)])
    config = dataclasses.replace(config, tensor_parallel_size=parts)
    line = BatchPlan.of(config, 8).smaller_than_asked(config)
    assert line is None if words is None else all(word in line for word in words)


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda path: path.name)
def test_the_flags_of_launch_scripts_are_ours(script):
    text = re.sub(r"#.*", "", script.read_text())
    flags = set(re.findall(r"(?<!\S)--[a-z][\w-]+", text.partition("pretrain_clip.py")[2]))
    known = {option for action in make_parser()._actions for option in action.option_strings}
    assert flags <= known


def test_a_run_begins_with_the_flags_of_another(tmp_path):
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).touch()
    data = [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]
    flags = ["--train-data", *data, "--tokenizer", "open_clip:RN50", "--aug-cfg", "hflip=0.5", "--lr", "0.1"]
    first = parse_args([*flags, "--name", "first", "--workers", "2", "--deepspeed_config", "zero2"])
    (tmp_path / "config.json").write_text(first.to_json())
    second = parse_args(["--config", str(tmp_path / "config.json"), "--lr", "0.2"])
    assert second == dataclasses.replace(first, lr=0.2, name=None)
    assert read_preset(second, "cpu")[0]["zero_optimization"]["stage"] == 2
    shorter = {"epochs": 3, "global_batch_size": 64}
    (tmp_path / "config.json").write_text(dataclasses.replace(first, **shorter).to_json())
    flags = ["--config", str(tmp_path / "config.json"), "--steps", "5", "--accum-freq", "3"]
    third = parse_args(flags)
    assert third == dataclasses.replace(first, steps=5, accum_freq=3, name=None)
    assert parse_args([*SYNTHETIC, "--aug-cfg", "scale=(0.5,1.0)"]).aug_cfg == {"scale": (0.5, 1.0)}


def test_every_setting_of_a_config_file_can_be_unset(tmp_path):
    """A flag without a default has a --no-NAME: a switch, or one whose default is not to have it."""
    set_here = {"lock_image": True, "grad_clip_norm": 1.0, "image_mean": [0.5, 0.5, 0.5], "save_every_n_steps": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(set_here), encoding="utf-8-sig")  # with the mark of Windows' editors
    flags = ["--config", str(path), *SYNTHETIC]
    assert {name: getattr(parse_args(flags), name) for name in set_here} == set_here
    assert parse_args([*flags, *(f"--no-{name.replace('_', '-')}" for name in set_here)]) == parse_args(SYNTHETIC)
    known = {option for action in make_parser()._actions for option in action.option_strings}
    for field in dataclasses.fields(TrainConfig):
        assert "--no-" + option_of(field.name)[2:] in known or field.default not in (None, False), field.name


def test_each_flag_of_open_clip_is_ours_or_ignored_or_has_an_equivalent(monkeypatch):
    params = pytest.importorskip("open_clip_train.params")
    theirs: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, _: theirs.update(self._option_string_actions))
        patch.setattr("open_clip_train.params.get_default_params", lambda _: {})
        with pytest.raises(AttributeError):  # of the arguments, which are None
            params.parse_args([])
    ours = make_parser()._option_string_actions.keys()
    assert len(theirs) > 90 and not theirs - {"-h", "--help"} - ours - EQUIVALENTS.keys()
    assert not EQUIVALENTS.keys() & ours


def test_ignored_flags_are_accepted_with_a_note():
    flags = "--local-loss --gather-with-grad --torchcompile --trace --dist-url=a:1 --val-num-samples 9".split()
    assert parse_args([*SYNTHETIC, *flags]) == parse_args(SYNTHETIC)
    notes = notes_on_ignored([*SYNTHETIC, *flags])
    assert len(notes) == 6 and notes[0].startswith("--local-loss is ignored: the loss and its gradients are always")


def test_what_open_clip_spells_otherwise_and_launchers_add_is_accepted(monkeypatch):
    monkeypatch.setattr("infcl.config.checks._is_installed", lambda package: True)
    flags = ["--local_rank=3", "--deepspeed", "--deepspeed-config", "ds_configs/zero3.json", "--report-to"]
    config = parse_args([*SYNTHETIC, "--precision", "amp_bfloat16", *flags, "wandb,tensorboard"])
    assert (config.precision, config.deepspeed_config) == ("amp_bf16", "ds_configs/zero3.json")
    assert config.report_to == "all" and parse_args([*SYNTHETIC, "--report-to", ""]).report_to == "none"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "No such"),
        ("[]", "the record is"),
        ("{", "not JSON"),
        ('{"lrr": 1}', "unknown key 'lrr'"),
        ('{"opt": "sgd"}', "--opt sgd: give one of adamw, "),
        ('{"image_interpolation": "nearest"}', "--image-interpolation nearest: give one of bicubic, "),
        ('{"image_mean": [0.5]}', "--image-mean 0.5 must be 3 numbers"),
        ('{"matryoshka_widths": ["8"]}', "matryoshka_widths.0 is '8'"),
    ],
)
def test_an_invalid_config_is_rejected(content, message, tmp_path):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_args(["--config", str(tmp_path / "config.json"), *SYNTHETIC])


def test_workers_auto_follows_the_cores():
    from infcl.train.build import workers_for

    assert parse_args([*SYNTHETIC, "--workers", "auto"]).workers == -1
    assert workers_for(1) == max(1, min(8, len(os.sched_getaffinity(0)) - 1)) and workers_for(1000) == 1


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples/recipes").glob("*.json")), ids=lambda path: path.stem)
def test_a_recipe_is_a_config(recipe):
    config = parse_args(["--config", str(recipe), "--dataset-type", "synthetic", "--train-num-samples", "10000"])
    given = json.loads(recipe.read_text())
    assert {name: getattr(config, name) for name in given} == given
    assert not config.global_batch_size % config.batch_size
    over = parse_args(["--config", str(recipe), *SYNTHETIC, "--warmup", "3", "--accum-freq", "2"])
    assert (over.warmup, over.accum_freq, over.global_batch_size) == (3, 2, None)


SECRET = "https://me:hunter2@host/0.tar and s3://b/0.tar?a=1&X-Amz-Signature=hunter2, (https://hunter2@h/?sig=hunter2)"


def test_what_a_program_prints_hides_the_passwords_and_tokens_of_urls(capsys):
    shown = "https://***@host/0.tar and s3://b/0.tar?a=***&X-Amz-Signature=***, (https://***@h/?sig=***)"
    assert redacted(SECRET) == shown
    for harmless in ("--lr 3? yes=no a@b.c", "https://host:8080/a@b/0.tar", "what? a = b & c", "s3://b/{0..3}.tar::x"):
        assert redacted(harmless) == harmless
    for _ in range(2):  # the second changes nothing
        redact_output()
    print(SECRET)
    print(SECRET, file=sys.stderr)
    logging.StreamHandler().handle(logging.makeLogRecord({"msg": SECRET}))
    try:
        raise OSError(SECRET)
    except OSError:
        traceback.print_exc()
    for printed in capsys.readouterr():
        assert shown in printed and "hunter2" not in printed
