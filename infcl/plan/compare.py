"""The planner beside what benchmarks/step.py measured: python -m infcl.plan --compare FILE.csv [--gpu h200]."""

import csv
import json
import re
from pathlib import Path

from infcl.config.preset import BUCKET
from infcl.models.config import load_model_config, with_overrides
from infcl.plan.loads import memory_of
from infcl.plan.setting import Gpu, Setting, captions_of
from infcl.plan.timing import samples_per_second

# What was so at these commits, and is planned so for rows of theirs:
# convolution apart      until 1f7968e autocast's steps had a bucket apart for its gradient (parts.bucket_bytes)
# first part apart       until 381b506 the loss had a block more (parts.loss_bytes); where that makes a row's peak
# reductions overlapped  until 489f350 stages 1 and 2 did, with DeepSpeed's buckets; of rows that do not say how
PAST = {
    "convolution apart": "0c83720 1de2850 38ac390 6591412 68ce065 6b83d03 7f09647 96af64e d7c9bff fe8de0c".split(),
    "first part apart": "0c83720 61184ba 7f09647 88dc65e c57863d".split(),
    "reductions overlapped": ["0c83720", "88dc65e"],
}

_NEEDED = "model gpus zero checkpointing blocks resident micro_batch micro_batches samples_per_second peak_gib".split()


def past(row: dict) -> frozenset[str]:
    """How it was when a row was measured. The first rows name no commit."""
    commit = str(row.get("commit") or "")[:7]
    return frozenset(name for name, commits in PAST.items() if not commit or commit in commits)


def read_steps(path: Path) -> list[dict]:
    """Rows of benchmarks/step.py's CSV, or of one with a part of its columns.

    ValueError where it lacks needed ones, and with the line for a value that cannot be.
    """
    try:
        with open(path) as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or []
    except OSError as error:
        raise ValueError(f"--compare {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--compare {path} is no CSV of benchmarks.step: it is no text") from None
    if missing := [name for name in _NEEDED if name not in columns]:
        raise ValueError(f"--compare {path} is no CSV of benchmarks.step: it has no column {', '.join(missing)}")
    for line, row in enumerate(rows, start=2):
        if wrong := _wrong(row):
            raise ValueError(f"--compare {path}, line {line}: {wrong}")
    return rows


def _wrong(row: dict) -> str | None:
    """Which value of a row cannot be, where one cannot."""
    for name, least in {"gpus": 1, "micro_batch": 1, "micro_batches": 1, "resident": 0}.items():
        if not (row[name] or "").isdecimal() or int(row[name]) < least:
            return f"{name} is {row[name]!r}, no whole number from {least} on"
    for name in ("samples_per_second", "peak_gib"):
        if not re.fullmatch(r"\d+(\.\d*)?(e[+-]?\d+)?", row[name] or "") or float(row[name]) == 0:
            return f"{name} is {row[name]!r}, no number above 0"
    if not re.fullmatch("[0-3](_offload)?", row["zero"] or ""):
        return f"zero is {row['zero']!r}, no stage like 1 or 3_offload"
    return None


def trains_whole_towers(row: dict) -> bool:
    """As every planned setting does; a row with a locked one has a part of its work and memory."""
    return "lock-image" not in row.get("label", "") and "lock-text" not in row.get("label", "")


def setting_of_row(row: dict, gpu: Gpu) -> Setting:
    gpus, micro_batch, micro_batches = (int(row[name]) for name in ("gpus", "micro_batch", "micro_batches"))
    options = json.loads(row.get("zero_options") or "{}")
    label, share = row.get("label", ""), float(row.get("text_share") or 1)
    dropout = re.search(r"force-patch-dropout ([\d.]+)", label)
    model = with_overrides(load_model_config(row["model"]), patch_dropout=float(dropout[1]) if dropout else None)
    tokens = round(share * model.text_cfg.context_length)  # above the context length, too: rows have places left
    return Setting(
        **captions_of(model, None if share == 1 else tokens),
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=gpus,
        global_batch=gpus * micro_batch * micro_batches,
        micro_batch=micro_batch,
        zero=int(row["zero"][0]),
        offload=row["zero"].endswith("offload"),
        checkpointing=row["checkpointing"] == "True",
        compiled=row["blocks"] == "compiled",
        resident=int(row["resident"]),
        precision=row.get("precision") or "amp_bf16",
        pixels="device" if "pixel-cache gpu" in label else "host",
        attention="auto" if row.get("attention") == "triton" else "torch",  # older files do not say
        past=past(row),
        overlap_comm=options.get("overlap_comm", True),
        reduce_bucket_size=options.get("reduce_bucket_size", BUCKET),
    )


def warmed_up(row: dict) -> bool:
    """Whether steps were made before those that were timed; without, compiling is in the times."""
    return "warm-up-steps 0" not in row.get("label", "")


def compare(rows: list[dict], gpu: Gpu) -> list[dict]:
    """[{"row", "samples_per_second", "speed_error", "peak_gib", "memory_error"}]: the plan, and its errors."""
    compared = []
    for row in rows:
        setting = setting_of_row(row, gpu)
        speed, peak = samples_per_second(setting), memory_of(setting)["peak"] / 2**30
        errors = {
            "speed_error": speed / float(row["samples_per_second"]) - 1,
            "memory_error": peak / float(row["peak_gib"]) - 1,
        }
        compared.append({"row": row, "samples_per_second": speed, "peak_gib": peak, **errors})
    return compared


def _options(row: dict) -> list[str]:
    """Of ZeRO, beyond the preset's; those of reductions only where there are any."""
    options = json.loads(row.get("zero_options") or "{}")
    if row["gpus"] == "1":
        options = {name: value for name, value in options.items() if name not in ("reduce_bucket_size", "overlap_comm")}
    words = ("parameters persistent" if "persistence" in name else f"{name} {options[name]}" for name in options)
    return list(dict.fromkeys(words))


def table(compared: list[dict]) -> str:
    """Markdown. Rows of one setting name their commits, and a machine that their label calls slower."""
    settings = [_words(one["row"]) for one in compared]
    lines = ["| GPUs | setting | samples/s measured / plan | GiB measured / plan |", "|---|---|---|---|"]
    for one, words in zip(compared, settings):
        row = one["row"]
        if settings.count(words) > 1:
            words = [*words, f"at {(row.get('commit') or 'no commit')[:7]}"]
            words += ["a slower machine"] if "slower machine" in row.get("label", "") else []
        speed = f"{float(row['samples_per_second']):.0f} / {one['samples_per_second']:.0f} ({one['speed_error']:+.0%})"
        memory = f"{float(row['peak_gib']):.1f} / {one['peak_gib']:.1f} ({one['memory_error']:+.0%})"
        lines.append(f"| {row['gpus']} | {', '.join(words[1:])} | {speed} | {memory} |")
    return "\n".join(lines)


def _words(row: dict) -> list[str]:
    """A setting in words, the number of GPUs first."""
    words = [row["gpus"], row["model"], f"ZeRO-{row['zero']}", row.get("precision") or "amp_bf16", row["blocks"]]
    words += ["checkpointing"] if row["checkpointing"] == "True" else []
    words += [f"{row['micro_batches']} x {row['micro_batch']}", f"R = {row['resident']}"]
    words += ["captions packed"] if float(row.get("text_share") or 1) < 1 else []
    words += ["Triton attention"] if row.get("attention") == "triton" else []
    words += _options(row)
    return words if warmed_up(row) else [*words, "not warmed up"]
