"""What the levers of a step cost and bring, from rows of benchmarks.step: kinds of blocks, ZeRO stages, optimizers.

A table shows what holds now, the preset's or the default's rows first. Rows of code that has been replaced stay in the
CSV; where one is shown to compare with, words say what it is.
"""

import dataclasses
import json
import re
from statistics import mean

from benchmarks.paper.raw import RESULTS, latest, markdown, newest, origin, rows, where
from benchmarks.paper.towers import OUTDATED
from infcl.config.preset import BUCKET
from infcl.plan.compare import compare, read_steps
from infcl.plan.setting import load_gpu
from infcl.plan.timing import STAGE_3_LIVE

PRESET = (100_000_000, False)  # of ds_configs/zero1.json and zero2.json within one host: bucket size, overlap
EACH_PASS = ("a1532d8", "42cacc8")  # commits of step_hosts.csv before what fits was gathered once a step
SLOW_HOST = 2.9  # host_factor of the machines of step_slow_host.csv, set by these rows


def levers() -> str:
    """ViT-L-14 on one H200, packed captions: precision, blocks, checkpointing, micro-batches; newest first."""
    found = [row for row in where(rows("step.csv"), gpus=1, model="ViT-L-14") if row["zero"] in (0, 1)]
    found = [row for row in found if (row["text_share"] or 1) < 1]  # whole captions: step-captions
    commits = list(dict.fromkeys(row["commit"] for row in reversed(found)))
    lines = []
    for row in sorted(found, key=lambda row: commits.index(row["commit"])):
        if " profile " in row["label"] or row["micro_batches"] == 1:  # slower under the profiler; see one_micro_batch
            continue
        shape = f"{row['micro_batch']} x {row['micro_batches']}"
        shape += ", checkpointing" if row["checkpointing"] == "True" else ""
        shape += f", {row['resident']} resident{_by_auto(row)}" if row["resident"] > 1 else ""
        shape += f", attention {sdpa[1]}" if (sdpa := re.search(r"\bsdpa (\w+)", row["label"])) else _whose(row)
        rate = _rate(row)
        used = [f"{row[name]:.3f}" for name in ("mfu", "hfu")]
        memory = f"{row['peak_gib']:.1f} GiB"
        lines.append([shape, row["precision"], row["blocks"], row["zero"], rate, *used, memory, row["commit"]])
    header = ["micro-batch x M", "precision", "blocks", "ZeRO", "samples/s", "MFU", "HFU", "peak memory", "commit"]
    return markdown(header, lines)


def one_micro_batch() -> str:
    """Steps of a single micro-batch, where what is done once a step shows most: ZeRO-1 beside none."""
    found = where(rows("step.csv"), model="ViT-L-14", micro_batches=1, precision="amp_bf16", blocks="eager")
    lines = [
        [
            row["gpus"], row["zero"], ", ".join(_replaced(row) or _as_preset(row) or _options(row)),
            _rate(row, per_gpu=True), f"{1000 * row['seconds_step']:.1f} ms",
            f"{row['peak_gib']:.1f} GiB", row["commit"],
        ]
        for row in sorted(found, key=lambda row: (row["gpus"], row["zero"], bool(_replaced(row)), *_unlike(row)))
    ]  # fmt: skip
    return markdown(["GPUs", "ZeRO", "", "samples/s per GPU", "update", "peak memory", "commit"], lines)


def _replaced(row: dict) -> list[str]:
    """What a row under ZeRO-1 ran that the trainer does not any more."""
    if (str(row["zero"]), row["commit"], row["precision"]) not in OUTDATED:
        return []
    return ["replaced: stage 1 over one rank" if row["gpus"] == 1 else "replaced: DeepSpeed's norm"]


def reductions() -> str:
    """ViT-L-14, compiled: how stages 1 and 2 reduce gradients, on three machines with two GPUs each; presets first."""
    lines = []
    order = ("machine", "micro_batches", "precision", "zero")
    for row in sorted(rows("step_reductions.csv"), key=lambda row: [*(row[name] for name in order), *_unlike(row)]):
        stated = row["gpus"] > 1 and row["zero"] > 0
        bucket, overlap = _reduced(row)
        bucket, overlap = (f"{bucket:.1e}", str(overlap).lower()) if stated else ("", "")
        bucket += " (preset)" if stated and _reduced(row) == PRESET else ""
        lines.append([
            row["machine"], row["gpus"], f"{row['micro_batch']} x {row['micro_batches']}", row["precision"],
            row["zero"], bucket, overlap, _rate(row, per_gpu=True),
            *[f"{1000 * row[f'seconds_{phase}']:.1f} ms" for phase in ("replay", "step")],
            f"{row['peak_gib']:.1f} GiB",
        ])  # fmt: skip
    header = ["machine", "GPUs", "pairs", "precision", "ZeRO", "`reduce_bucket_size`", "`overlap_comm`"]
    header += ["samples/s per GPU"]
    return markdown([*header, "replay", "update", "peak memory"], lines) + f"\n\n{origin(rows('step_reductions.csv'))}."


def _as_preset(row: dict) -> list[str]:
    return ["as the preset"] if row["gpus"] > 1 and row["zero"] and _reduced(row) == PRESET else []


def _reduced(row: dict) -> tuple[int, bool]:
    """Bucket size and overlap of a row; where it does not say, they are DeepSpeed's, as in the presets of its time."""
    options = json.loads(row["zero_options"])
    return options.get("reduce_bucket_size", BUCKET), options.get("overlap_comm", True)


def _unlike(row: dict) -> tuple:
    return row["gpus"], _reduced(row) != PRESET


def _by_auto(row: dict) -> str:
    return " (`auto`)" if "resident-micro-batches auto" in row["label"] else ""


def _whose(row: dict) -> str:
    return ", Triton attention" if row["attention"] == "triton" else ""


def captions() -> str:
    """One H200, autocast, compiled: captions packed and whole, model by model, as measured last."""
    every = rows("step_captions.csv")
    models = list(dict.fromkeys(row["model"] for row in every))
    found = [row for model in models for row in newest(where(every, model=model))]
    lines = []
    for row in sorted(found, key=lambda row: (models.index(row["model"]), row["text_share"])):
        how = "whole" if row["text_share"] == 1 else f"packed: {row['text_share']:.0%} of the places"
        how += _whose(row)
        shape = f"{row['micro_batch']} x {row['micro_batches']}"
        seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay")]
        lines.append([row["model"], shape, how, _rate(row), *seconds, f"{row['peak_gib']:.1f} GiB", row["commit"]])
    header = ["model", "micro-batch x M", "captions", "samples/s", "encode", "replay", "peak memory", "commit"]
    return markdown(header, lines) + f"\n\n{origin(found)}."


def attention() -> str:
    """One H200, autocast, compiled: whole steps with torch's attention and with the Triton kernels."""
    found = rows("step_attention.csv")
    lines = []
    for row in found:
        dropout = re.search(r"force-patch-dropout ([\d.]+)", row["label"])
        model = f"{row['model']}, {float(dropout[1]):.0%} of the patches dropped" if dropout else row["model"]
        captions = "whole" if row["text_share"] == 1 else "packed"
        shape = f"{row['micro_batch']} x {row['micro_batches']}"
        seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay")]
        mean = f"{row['samples_per_second_mean']:.0f} +- {row['samples_per_second_std']:.0f}"
        rates = [f"{row['samples_per_second']:.0f}", mean]
        lines.append([model, shape, captions, row["attention"], *rates, *seconds, f"{row['mfu']:.3f}"])
    header = ["model", "micro-batch x M", "captions", "attention", "samples/s: median", "mean"]
    return markdown([*header, "encode", "replay", "MFU"], lines) + f"\n\n{origin(found)}."


def residents() -> str:
    """One H200, autocast, compiled: as many graphs kept between the passes as fit, the default, and one."""
    found = rows("step_resident.csv")
    shapes = list(dict.fromkeys((row["model"], row["micro_batch"]) for row in found))
    lines = []
    for row in sorted(found, key=lambda row: (shapes.index((row["model"], row["micro_batch"])), not _by_auto(row))):
        kept = f"{row['resident']} of {row['micro_batches']}" + _by_auto(row)
        shape = f"{row['micro_batch']} x {row['micro_batches']}"
        mean = f"{row['samples_per_second_mean']:.0f} +- {row['samples_per_second_std']:.0f}"
        rates = [f"{row['samples_per_second']:.0f}", mean]
        seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay")]
        used = [f"{row[name]:.3f}" for name in ("mfu", "hfu")]
        memory = f"{row['peak_gib']:.1f} GiB"
        lines.append([row["model"], shape, kept, *rates, *seconds, *used, memory, row["commit"]])
    header = ["model", "micro-batch x M", "graphs kept", "samples/s: median", "mean", "encode", "replay", "MFU", "HFU"]
    return markdown([*header, "peak memory", "commit"], lines) + f"\n\n{origin(found)}."


def kernels() -> str:
    """Where the GPU time of a step goes, by kinds of kernels."""
    newest = rows("kernels.csv")[-1]
    found = where(rows("kernels.csv"), label=newest["label"], commit=newest["commit"])
    kinds: dict[str, list[dict]] = {}
    for row in found:
        kinds.setdefault(row["kind"], []).append(row)
    whole, lines = sum(row["ms"] for row in found), []
    for kind, of_kind in sorted(kinds.items(), key=lambda entry: -sum(row["ms"] for row in entry[1])):
        ms, calls = (sum(row[name] for row in of_kind) for name in ("ms", "calls"))
        lines.append([kind, f"{ms:.1f} ms", f"{ms / whole:.1%}", f"{calls:,.0f}" if calls else ""])
    return markdown([newest["label"], "a step", "share", "calls"], lines) + f"\n\n{origin(found)}."


def attention_layers() -> str:
    """One layer's attention, compiled: torch's kernels, the Triton kernels, and what a copy of its bytes takes."""
    found = rows("attention.csv")
    cases, ways = (list(dict.fromkeys(row[name] for row in found)) for name in ("case", "way"))
    lines = []
    for case in cases:
        of_case = {row["way"]: row for row in where(found, case=case)}
        floor = next(iter(of_case.values()))
        cells = [
            f"{of_case[way]['forward_ms']:.3f} / {of_case[way]['both_ms']:.3f}" if way in of_case else ""
            for way in ways
        ]
        lines.append([case, *cells, f"{floor['forward_floor_ms']:.3f} / {floor['both_floor_ms']:.3f}"])
    return markdown(["", *ways, "bytes at a copy's rate"], lines) + f"\n\nms. {origin(found)}."


def zero_3() -> str:
    """ViT-L-14 on four H200s, 128 x 8, checkpointing: ZeRO-3 beside ZeRO-1 of its commit, newest first."""
    same = {"model": "ViT-L-14", "precision": "bf16", "checkpointing": "True", "micro_batch": 128, "micro_batches": 8}
    found = [row for row in where(rows("step.csv"), **same, gpus=4) if "not kept" not in row["label"]]
    commits = list(dict.fromkeys(row["commit"] for row in reversed(found)))
    commits = [commit for commit in commits if where(found, commit=commit, zero=3)]  # without, nothing to compare
    lines = []
    for commit in commits:
        own = where(found, commit=commit)
        plain = where(own, zero=1)
        for row in sorted(own, key=lambda row: (row["zero"], _what(row))):
            rate = _rate(row, per_gpu=True)
            if row["zero"] == 3 and plain:
                rate += f" ({row['samples_per_second_per_gpu'] / plain[0]['samples_per_second_per_gpu']:.2f} of ZeRO-1)"
            seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay")]
            lines.append([row["gpus"], row["zero"], _what(row), rate, *seconds, f"{row['peak_gib']:.1f} GiB", commit])
    header = ["GPUs", "ZeRO", "", "samples/s per GPU", "encode", "replay", "peak memory", "commit"]
    return markdown(header, lines)


def zero_3_hosts() -> str:
    """ViT-L-14 on two H200s, 1,024 pairs on each, checkpointing, bf16: stages 1 and 3, on unlike machines.

    Of machines on which stage 3 gathered once a step.
    """
    every = rows("step_hosts.csv")
    machines = {row["python_loop_seconds"] for row in every if _gathers_once(row)}
    found = [row for row in every if row["python_loop_seconds"] in machines]
    lines = []
    for row in sorted(
        found, key=lambda row: (row["python_loop_seconds"], row["micro_batch"], row["zero"], not _gathers_once(row))
    ):
        same = {name: row[name] for name in ("python_loop_seconds", "micro_batch")}
        rate, plain = _rate(row, per_gpu=True), where(found, **same, zero=1)
        if row["zero"] == 3 and plain:
            rate += f" ({row['samples_per_second'] / mean(one['samples_per_second'] for one in plain):.2f} of ZeRO-1)"
        seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay")]
        gathered = ("once a step" if _gathers_once(row) else "in each pass") if row["zero"] == 3 else ""
        lines.append([
            f"{row['python_loop_seconds']:.2f} s", row["micro_batch"], row["zero"], gathered, rate, *seconds,
            f"{row['peak_gib']:.1f} GiB", row["commit"],
        ])  # fmt: skip
    header = ["Python loop", "m", "ZeRO", "gathers", "samples/s per GPU", "encode", "replay", "peak memory", "commit"]
    return markdown(header, lines)


def _gathers_once(row: dict) -> bool:
    reuse = json.loads(row["zero_options"]).get("stage3_max_reuse_distance", STAGE_3_LIVE)
    return row["zero"] == 3 and row["commit"] not in EACH_PASS and reuse >= STAGE_3_LIVE


def slow_host() -> str:
    """ViT-L-14, 128 x 8, checkpointing, on machines whose processors were slow: what the host's work costs ZeRO-3."""
    lines = []
    for row, one in zip(rows("step_slow_host.csv"), steps_on_slow_hosts(), strict=True):
        seconds = [f"{row[f'seconds_{phase}']:.3f} s" for phase in ("encode", "replay", "step")]
        plan = f"{one['samples_per_second'] / row['gpus']:.0f} ({one['speed_error']:+.0%})"
        lines.append([row["gpus"], row["zero"], _rate(row, per_gpu=True), plan, *seconds, row["commit"]])
    header = ["GPUs", "ZeRO", "samples/s per GPU", "planned", "encode", "replay", "update", "commit"]
    return markdown(header, lines)


def steps_on_slow_hosts() -> list[dict]:
    """The measured steps beside the plan, with the factor for the host that fits them best."""
    gpu = dataclasses.replace(load_gpu("h200"), host_factor=SLOW_HOST)
    return compare(read_steps(RESULTS / "step_slow_host.csv"), gpu)


def _rate(row: dict, *, per_gpu: bool = False) -> str:
    """Samples/s: the median of the row's steps, and their standard deviation where it was kept."""
    rate = row["samples_per_second_per_gpu"] if per_gpu else row["samples_per_second"]
    spread = row.get("samples_per_second_std") or 0
    return f"{rate:.0f}" + (f" +- {spread / (row['gpus'] if per_gpu else 1):.1f}" if spread else "")


def _what(row: dict) -> str:
    """What sets a row apart: what its label says in parentheses, options of ZeRO, code that was mended."""
    note = row["label"].split("(")[1].rstrip(")") if "(" in row["label"] else ""
    words = [note] if note and "printed row" not in note else []
    words += _options(row)
    words += ["eager"] if row["blocks"] == "eager" else []
    return ", ".join(words)


def _options(row: dict) -> list[str]:
    """Of ZeRO, beyond DeepSpeed's and the preset's."""
    options = json.loads(row["zero_options"])
    words = ["all parameters persistent"] if any("persistence" in name for name in options) else []
    return words + [f"`{name}` {json.dumps(value)}" for name, value in options.items() if "persistence" not in name]


def optimizers() -> str:
    """ViT-B-16 on one H200 with each --opt: samples/s, the update, peak memory."""
    found = latest(where(rows("optimizers.csv"), model="ViT-B-16"), "label")
    lines = [
        [
            f"`{row['label'].split(' opt ')[1]}`", _rate(row),
            f"{1000 * row['seconds_step']:.1f} ms", f"{row['peak_gib']:.1f} GiB",
        ]
        for row in found
    ]  # fmt: skip
    return markdown(["`--opt`", "samples/s", "update", "peak memory"], lines) + f"\n\n{origin(found)}."


def locked_tower() -> str:
    """The paper's LiT setting on one H200, both towers trained and the image tower locked."""
    found = latest(where(rows("optimizers.csv"), model="ViT-B-16-BERT-base"), "label")
    lines = [
        [
            "`--lock-image`" if "lock-image" in row["label"] else "both trained", _rate(row),
            *(f"{row[f'seconds_{phase}']:.2f} s" for phase in ("encode", "replay")), f"{row['peak_gib']:.1f} GiB",
        ]
        for row in found
    ]  # fmt: skip
    header = ["towers", "samples/s", "first pass", "second pass", "peak memory"]
    return markdown(header, lines) + f"\n\n{origin(found)}."
