"""Steps of whole towers: measured ones beside the plan, other towers, thousands of GPUs."""

import dataclasses

from benchmarks.paper.raw import NOT_MEASURED, RESULTS, latest, markdown, ms, origin, rows, where
from benchmarks.paper.speed import loss_rows
from benchmarks.peer_trainers import TRAINERS
from infcl.models.config import load_model_config
from infcl.plan.compare import compare, read_steps, table, warmed_up
from infcl.plan.loads import memory_of
from infcl.plan.loss_time import loss_seconds
from infcl.plan.search import fastest
from infcl.plan.setting import Gpu, Setting, load_gpu, parameters_of
from infcl.plan.timing import phases_of, samples_per_second

GIB = 2**30
TOWERS = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-H-14", "ViT-bigG-14")


# (ZeRO, commit, precision) of code that was replaced: ZeRO-3 gathered every block three times; ZeRO-1 took its norm
# tensor by tensor, which shows in steps of one micro-batch.
OUTDATED = (("3", "188be76", "bf16"), ("1", "4fe3df6", "amp_bf16"))


def steps() -> list[dict]:
    """Measured steps of benchmarks.step as read_steps reads them, without those of code that has been replaced.

    And without those that were not warmed up: their times are also those of compiling.
    """
    files = [RESULTS / "step.csv", *sorted(RESULTS.glob("plan_steps*.csv"))]
    found = [row for path in files for row in read_steps(path)]
    return [
        row
        for row in found
        if (row["zero"], row.get("commit"), row.get("precision")) not in OUTDATED
        and "not kept" not in row["label"]
        and warmed_up(row)
    ]


def measured_steps() -> str:
    """Every measured step of benchmarks.step, beside the plan, newest first; those without a commit are oldest."""
    found = compare(steps(), load_gpu("h200"))
    commits = ["", *dict.fromkeys(one["row"]["commit"] for one in found if one["row"].get("commit"))]
    return table(sorted(found, key=lambda one: -commits.index(one["row"].get("commit") or "")))


def h100() -> Gpu:
    """The shipped profile, and of the machine that was measured how slow its host is."""
    return dataclasses.replace(load_gpu("h100"), host_factor=load_gpu(str(RESULTS / "h100_measured.json")).host_factor)


def steps_h100() -> str:
    """Steps of a card by whose steps no figure of the planner was set."""
    return f"{table(compare(read_steps(RESULTS / 'step_h100.csv'), h100()))}\n\n{origin(rows('step_h100.csv'))}."


def plan_errors() -> str:
    """How far the plan is from the measured steps, under the shipped profile and the one that --measure wrote."""
    measured, spans = steps(), []
    for profile in ("h200", str(RESULTS / "h200_measured.json")):
        errors = [one["speed_error"] for one in compare(measured, load_gpu(profile))]
        spans.append(f"{min(errors):+.0%} and {max(errors):+.0%}")
    return (
        f"Samples/s of the {len(measured)} measured steps below are planned within {spans[0]} by the shipped profile,\n"
        f"within {spans[1]} by what `--measure` wrote on an H200 ([h200_measured.json](results/h200_measured.json))."
    )


def measured_losses() -> list[dict]:
    """What was measured last of the loss alone, 16-bit features, by GPUs and batch."""
    found = latest(where(loss_rows(), impl="inf_cl", dtype="bfloat16"), "gpus", "global_batch", "dim")
    return sorted(found, key=lambda row: (row["gpus"], row["global_batch"], row["dim"]))


def planned_loss(gpus: int, pairs: int, dim: int) -> float:
    """ms of the loss and its ring on H200s of one host, as planned."""
    model = dataclasses.replace(load_model_config("ViT-L-14"), embed_dim=dim)
    setting = Setting(
        model=model, gpu=load_gpu("h200"), gpus=gpus, gpus_per_node=gpus, global_batch=pairs, micro_batch=128
    )
    return 1000 * loss_seconds(setting)


def planned_losses() -> str:
    """The loss alone, ms: measured, and what the plan has for it and the ring."""
    lines = []
    for row in measured_losses():
        plan = planned_loss(row["gpus"], row["global_batch"], row["dim"])
        error = plan / row["median_ms"] - 1
        times = f"{ms(row['median_ms'])} / {ms(plan)} ({error:+.0%})"
        lines.append([row["gpus"], f"{row['global_batch']:,}", row["dim"], times])
    return markdown(["GPUs", "b", "D", "ms measured / plan"], lines)


def peer_steps() -> str:
    """open_clip's towers alone, from benchmarks.step --peer."""
    found = rows("step_peer.csv")
    if not found:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = [
        [row["label"], row["micro_batch"], f"{row['samples_per_second']:.0f}", f"{row['peak_gib']:.1f}"]
        for row in found
    ]
    return markdown(["", "micro-batch", "samples/s", "GiB"], lines) + f"\n\n{origin(found)}."


def peer_trainers() -> str:
    """Trainers of others and ours, from benchmarks.peers_train: the last row of each setting."""
    keys = ("program", "gpus", "model", "precision", "blocks", "checkpointing", "micro_batch", "accum_freq", "device")
    found = latest(rows("peers_train.csv"), *keys)
    if not found:
        return "The trainers are not measured side by side yet."
    blocks, programs = ("eager", "compiled"), tuple(TRAINERS)
    found.sort(key=lambda row: (blocks.index(row["blocks"]), programs.index(row["program"])))
    found.sort(key=lambda row: (row["gpus"], row["model"], row["accum_freq"]))
    lines = []
    for row in found:
        name = row["program"] + (f" {row['version']}" if row["version"] != "" else "")
        words = row["blocks"] + (", checkpointing" if row["checkpointing"] else "")
        words += "" if row["precision"] == "amp_bf16" else f", {row['precision']}"
        shape = f"{row['micro_batch']} x {row['accum_freq']}"
        cells = [row["status"], "", ""]
        if row["status"] == "ok":
            rate = f"{row['samples_per_second']:,.0f} ({row['mean']:,.0f} +- {row['std']:,.0f}, {row['steps']} steps)"
            cells = [rate, "" if row["waiting"] == "" else f"{row['waiting']:.0%}", f"{row['peak_gib']:.1f}"]
        lines.append([row["gpus"], row["model"], shape, name, words, *cells])
    header = ["GPUs", "model", "micro-batch x accumulation", "trainer", "blocks", "samples/s: median (mean)"]
    return markdown([*header, "waiting for data", "peak, GiB"], lines) + f"\n\n{origin(found)}."


def towers() -> str:
    """Eight H200s, 32k pairs, ZeRO-1 with checkpointing, bf16: the fastest micro-batch, as planned."""
    lines = []
    for name in TOWERS:
        model = load_model_config(name)
        setting = Setting(
            model=model, gpu=load_gpu("h200"), gpus=8, global_batch=32768, micro_batch=128, precision="bf16"
        )
        seconds, best = fastest(setting, count=1)[0]
        loss = sum(phase.exposed for phase in phases_of(best) if phase.name in ("loss", "ring"))
        words = f"ZeRO-{best.zero}, micro-batch {best.micro_batch}" + (", checkpointing" if best.checkpointing else "")
        lines.append([
            name, f"{parameters_of(model) / 1e6:.0f}M", words, f"{samples_per_second(best):,.0f}", f"{seconds:.1f} s",
            f"{1000 * loss:.0f} ms ({loss / seconds:.2%})", f"{memory_of(best)['peak'] / GIB:.0f} GiB",
        ])  # fmt: skip
    header = ["towers", "parameters", "fastest setting", "samples/s", "step", "of it the loss", "peak"]
    return markdown(header, lines)


def smaller_towers() -> str:
    """ViT-B-16, which set one constant of the plan: a step on one H200, and a huge one, not warmed up, on four."""
    warm = [row for row in read_steps(RESULTS / "optimizers.csv") if row["label"].endswith("opt adamw")]
    huge = [row for row in read_steps(RESULTS / "step.csv") if row["model"] == "ViT-B-16"]
    return table(compare(warm + huge, load_gpu("h200")))


def thousands() -> str:
    """From the committed sweeps: what grows with the GPUs at a fixed batch per GPU."""
    lines = []
    for name, what in (("scaling_nic400.csv", "400 Gb/s a GPU"), ("scaling_eth100.csv", "100 Gb/s a GPU")):
        found = rows(name)
        for gpus in (8, 64, 512, 4096):
            cells = [what, f"{gpus:,}"]
            for ring in ("flat", "two-level"):
                row = next((row for row in found if row["ring"] == ring and row["gpus"] == gpus), None)
                if row is None:
                    cells += ["", ""]
                    continue
                one = next(other for other in found if other["ring"] == ring and other["gpus"] == 8)
                rate = row["samples_per_second_per_gpu"] / one["samples_per_second_per_gpu"]
                cells += [f"{row['seconds']:.2f} s", f"{rate:.0%}"]
            row = next(row for row in found if row["gpus"] == gpus)
            lines.append([*cells[:2], f"{row['global_batch']:,}", *cells[2:]])
    header = ["network", "GPUs", "global batch", "flat: step", "rate per GPU", "two-level: step", "rate per GPU"]
    return markdown(header, lines)
