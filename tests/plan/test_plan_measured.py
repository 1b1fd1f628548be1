"""The planner against what was measured: the paper's tables, steps, peaks and losses on H200s and H100s."""

import dataclasses

import pytest

from benchmarks.largest_batch import FILLED, planned_peak
from benchmarks.rows import grouped, rows
from infcl.models import load_model_config
from infcl.plan.profile import load_gpu
from infcl.plan.setting import Setting
from infcl.plan.timing import LEAD_SECONDS, loss_seconds
from tests.lib.measured import cases, stored
from tests.lib.paper import paper_memory, paper_step

GIB = 2**30
CARD_GIB = load_gpu("a800-80g").memory_gib


def paper_cell(row: dict) -> dict[str, float]:
    setting = Setting(
        model=load_model_config(row["model"]), gpu=load_gpu("a800-80g"), gpus=int(row["gpus"]), micro_batch=128, zero=0,
        global_batch=int(row["batch_k"]) * 1024, loss=row["loss"], pixels="host" if row["offload"] == "1" else "device",
    )  # fmt: skip
    return {name: size / GIB for name, size in paper_memory(setting).items()}


def test_every_cell_of_the_papers_tables():
    """Table 2's batches are at the edge of the card: 3% is what the estimate may be off there."""
    for row in stored("paper_memory.csv"):
        memory = paper_cell(row)
        if row["table"] == "1":
            assert (memory["peak"] <= CARD_GIB) == (row["fits"] == "1"), row
        if row["table"] == "1" and row["fits"] == "1":
            assert memory["peak"] == pytest.approx(float(row["peak_gib"]), rel=0.05), row
            assert memory["loss"] == pytest.approx(float(row["loss_gib"]), rel=0.1, abs=0.6), row
        if row["table"] == "2":
            assert memory["peak"] <= 1.03 * CARD_GIB, row
            assert memory["loss"] == pytest.approx(float(row["loss_gib"]), rel=0.1), row


def test_the_steps_of_the_papers_figure_4():
    for row in rows("paper_steps.csv"):
        planned = paper_step(row["model"], row["gpus"], row["batch_k"] * 1024)
        assert planned == pytest.approx(row["seconds"], rel=0.10), row


def test_plans_are_as_near_to_what_was_measured_as_the_docs_say():
    """`python -m tests.lib.measured` writes the docs' errors again."""
    by_kind = grouped([case._asdict() | {"error": case.error} for case in cases()], "kind")
    assert len(by_kind) == 17
    for kind, found in by_kind.items():
        wrong = [(case["name"], case["error"]) for case in found if abs(case["error"]) >= case["bound"]]
        assert not wrong, (kind, wrong)
    written = [(case.kind, f"{case.planned:.4g}", f"{case.measured:.4g}") for case in cases()]
    assert [tuple(row.values()) for row in stored("plan_errors.csv")] == written


@pytest.mark.parametrize("row", rows("table1_h200.csv"), ids=str)
def test_what_fitted_is_planned_to_and_what_did_not_is_not(row):
    """Of three losses, held to 80 GB."""
    names = ("model", "gpus", "pixels", "micro_batch", "loss", "precision")
    setting = {name: row[name] for name in names} | {"checkpointing": bool(row["checkpointing"])}
    peak = planned_peak(pairs=row["global_batch"], **setting)
    assert (peak < FILLED * row["memory_gb"] * 1e9) == bool(row["fits"])


def test_a_slow_host_begins_a_long_loss_later_and_takes_as_much_longer_for_a_short_one():
    setting = Setting(model=load_model_config("ViT-L-14"), gpu=load_gpu("h200"), gpus=1, global_batch=0, micro_batch=1)
    slow = dataclasses.replace(load_gpu("h200"), host_factor=2.0)
    long, short = (setting.with_(global_batch=pairs) for pairs in (2**17, 1024))
    assert loss_seconds(long.with_(gpu=slow)) - loss_seconds(long) == pytest.approx(LEAD_SECONDS)
    assert loss_seconds(short.with_(gpu=slow)) == pytest.approx(2 * loss_seconds(short))
