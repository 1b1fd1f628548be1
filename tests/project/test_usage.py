"""Usage errors: whatever the command, an error is one line that names its cause, and the exit code is 2."""

import importlib
import re
import shlex
import sys

import pytest
import torch

GPUS = {"benchmarks.loss --gpus 4": 1, "benchmarks.loss --impl clip, --check": 1}  # visible ones, otherwise none
PLAN = {
    "--caption-tokens 78": "must lie in .1, 77.",
    "--gpu a900": "no such profile .known: a10, a100-40g, a100-80g, a800-80g",
    "--link wet-string": "known: .*nic-200, nic-400, nic-800",
    "--gpu v100-32g": "v100-32g does not compute bf16: use --precision fp16 or fp32",
    "--gpus 12": "12 GPUs do not fill nodes of 8",
    "--global-batch-size 1001": "--global-batch-size 1001 cannot be shared by 8 ranks",
    "--batch-size many": "invalid int value: 'many'",
    "--model ViT-Z-99": "ViT-Z-99",
    "--gpus 0": "--gpus 0 and --gpus-per-node 8 must be greater than 0",
    "--resident-micro-batches 0": "--resident-micro-batches 0",
    "--deepspeed_config zero0 --precision bf16": "--precision bf16 needs ZeRO stage >= 1",
    "--model open_clip:ViT-B-32": "a model that open_clip builds",
    "--zero 3": "unrecognized arguments: --zero 3",
    "--tensor-parallel-size 3 --batch-size 3": "8 GPUs are no multiple of --tensor-parallel-size 3",
    "--tensor-parallel-size 8 --model ViT-B-32": "8 does not divide the 12 heads of the image tower",
    "--tensor-parallel-size 16 --gpus 16": "16 spans nodes of 8 GPUs",
    "--measure none/gpu.json": "there is no folder none",
}
OTHERS = {
    "infcl.evaluate --device cpu --task retrieval --data {empty} --checkpoint {empty}": "no weights there",
    "infcl.evaluate --task zeroshot --data {empty} --checkpoint {empty} --batch-size 0": "--batch-size 0 must be",
    "infcl.report {empty}": "not a run folder",
    "infcl.report {started}": "no step yet",
    "infcl.convert export {empty}": "empty is no run folder",
    "infcl.convert import {empty} --out {empty}/out": "no weights there",
    "infcl.data.shards index /no/such.tar": "/no/such.tar",
    "infcl.data.shards index {started}/gone.tar": "gone.tar: not found .No such file or directory",
    "infcl.data.shards index @{empty}/none": "cannot read the urls of @.*none: No such file or directory",
    "infcl.data.demo --out {started}/metrics.jsonl/x": "--out .*: Not a directory",
    "infcl.cluster.hostfile check {started}/wide": "line 1: 'xxx.*xxx': after the host comes slots=N",
    "infcl.data.tokenizer train --train-data /no/such.tar --vocab-size 60 --out x": "/no/such.tar",
    "infcl.cluster.hostfile check {empty}/none": "none: No such file or directory",
    "benchmarks.loss": "it measures on GPUs, and none is visible",
    "benchmarks.loss --check": "none is visible",
    "benchmarks.loss --gpus 4": "--gpus 4: 1 visible here",
    "benchmarks.loss --impl inf_cl,foo": "--impl: unknown loss 'foo'; one of inf_cl, clip, .*nt_xent",
    "benchmarks.loss --impl clip, --check": "--impl: unknown loss ''; one of",
    "benchmarks.retrieval --gpus 1": "none is visible",
    "benchmarks.step --device cuda --model demo": "--device cuda: no GPU is visible",
}
COMMANDS = OTHERS | {f"infcl.plan {flags}": message for flags, message in PLAN.items()}


def code_of(module: str, arguments: list[str]) -> int:
    """Run a command's main in this process; return its exit code."""
    sys.argv = [module, *arguments]  # what a main without arguments reads
    name = module if importlib.util.find_spec(module).submodule_search_locations is None else f"{module}.__main__"
    main = importlib.import_module(name).main
    try:
        return main(arguments) if main.__code__.co_argcount else main()
    except SystemExit as end:
        return end.code
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_usage_error_is_one_line_with_exit_code_2(command, tmp_path, monkeypatch, capsys):
    """The trainer's own flags are in tests/config/test_config.py, its ranks in tests/train/test_entry.py."""
    for name in ("empty", "started"):
        (tmp_path / name).mkdir()
    (tmp_path / "started" / "metrics.jsonl").write_text("")
    (tmp_path / "started" / "gone.tar").symlink_to("/no/such")
    (tmp_path / "started" / "wide").write_text("x" * 10_000)
    gpus = GPUS.get(command, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(sys, "argv", sys.argv)
    module, *arguments = shlex.split(command.format(empty=tmp_path / "empty", started=tmp_path / "started"))
    assert code_of(module, arguments) == 2
    reported = capsys.readouterr().err
    assert re.search(COMMANDS[command], reported) and reported.count("\n") == 1, reported
    paths = re.findall(r"/[\w./-]+\w", reported)
    assert len(paths) == len(set(paths)) and len(reported) < 1000, reported
