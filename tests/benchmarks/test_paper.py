"""docs/ shows what the raw results under docs/results say: rendering them again changes nothing."""

import pytest

from benchmarks.paper import accuracy, memory, speed, steps
from benchmarks.paper.__main__ import DOCS, FIGURES, PAGES, REGIONS
from benchmarks.paper.accuracy import table_3_pairs
from benchmarks.paper.draw import digest, digest_of, draw, draw_bar
from benchmarks.paper.raw import markdown, mean_and_deviation, rows
from benchmarks.paper.regions import fill, names
from benchmarks.paper.towers import measured_steps
from benchmarks.paper.towers import steps as planned_steps


@pytest.mark.parametrize("page", PAGES)
def test_rendering_a_page_again_changes_nothing(page):
    text = (DOCS / page).read_text()
    assert names(text)
    assert fill(text, REGIONS) == text, f"docs/{page} is not what docs/results says: make results"


@pytest.mark.parametrize("picture", FIGURES)
def test_a_plot_shows_the_raw_results(picture):
    panels = FIGURES[picture][0]()
    if any(panels.values()):
        assert digest_of(DOCS / "results" / picture) == digest(panels), f"docs/results/{picture}: make results"


def test_every_region_is_shown_somewhere():
    shown = {name for page in PAGES for name in names((DOCS / page).read_text())}
    assert shown == set(REGIONS)


def test_a_region_is_filled_and_what_lies_around_it_stays():
    page = "a\n<!-- results: one -->\nold\nold\n<!-- end -->\nb\n<!-- results: two -->\n<!-- end -->\n"
    filled = fill(page, {"one": lambda: "new", "two": lambda: "more\n"})
    assert filled == "a\n<!-- results: one -->\nnew\n<!-- end -->\nb\n<!-- results: two -->\nmore\n<!-- end -->\n"
    with pytest.raises(ValueError, match="no function fills the region 'two'; there are one"):
        fill(page, {"one": lambda: "new"})
    with pytest.raises(ValueError, match="no <!-- end -->"):
        fill("<!-- results: one -->\n", {"one": lambda: "new"})


def test_a_plot_carries_the_digest_of_its_data(tmp_path):
    panels = {"a": {"infcl": [(1024, 1.0), (2048, 2.0)]}}
    draw(panels, tmp_path / "plot.png", x=("pairs",), y="ms")
    assert digest_of(tmp_path / "plot.png") == digest(panels)
    assert digest(panels) != digest({"a": {"infcl": [(1024, 1.0), (2048, 2.1)]}})
    assert digest_of(tmp_path / "none.png") is None


def test_the_bar_of_tiling_says_what_overlapping_hides_or_costs(tmp_path, monkeypatch):
    row = {"gpus": 4, "global_batch": 8, "dim": 2, "products ms": 5.0, "tiles ms": 6.0, "ring, waiting ms": 8.0}
    parts = {}
    for ring in (7.0, 8.5):
        monkeypatch.setattr(speed, "rows", lambda name, ring=ring: [row | {"ring ms": ring}])
        parts[ring] = {name: width for (name, [(width,)]) in next(iter(speed.tiling_bar().values())).items()}
    assert parts[7.0] | {"communication, not hidden": 1.0, "communication that overlapping hides": 1.0} == parts[7.0]
    assert parts[8.5] | {"communication, waited for": 2.0, "more where it is overlapped": 0.5} == parts[8.5]
    assert [sum(widths.values()) for widths in parts.values()] == [8.0, 8.5]
    draw_bar(speed.tiling_bar(), tmp_path / "bar.png")
    assert digest_of(tmp_path / "bar.png") == digest(speed.tiling_bar())


def test_the_bar_of_tiling_has_no_negative_part_where_tiles_alone_take_longer(monkeypatch):
    row = {"gpus": 4, "global_batch": 8, "dim": 2, "products ms": 40.0, "tiles ms": 50.0, "ring, waiting ms": 46.0}
    found = [row | {"ring ms": 45.0}, row | {"global_batch": 4, "ring ms": 99.0}]
    monkeypatch.setattr(speed, "rows", lambda *names: found)
    (parts,) = speed.tiling_bar().values()
    assert {name: width for name, [(width,)] in parts.items()} == {
        "matrix products": 40.0, "epilogue, launches": 5.0, "communication that overlapping hides": 1.0
    }  # fmt: skip


def test_numbers_are_read_as_such_and_commits_are_not(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("commit,gpus,ms,said\n6e15030,4,1.5,\n")
    monkeypatch.setattr("benchmarks.paper.raw.RESULTS", tmp_path)
    assert rows("a.csv", "none.csv") == [{"commit": "6e15030", "gpus": 4, "ms": 1.5, "said": ""}]


def test_means_and_paired_differences(monkeypatch):
    assert mean_and_deviation([1.0, 2.0, 3.0], 2) == "2.00 +- 1.00" and mean_and_deviation([0.5]) == "0.500"
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
    metrics = ("zero_shot_top1", "image_to_text_r1", "text_to_image_r1")
    stored = [
        {"loss": loss, "seed": seed, **dict.fromkeys(metrics, 0.1 * seed + shift)}
        for loss, shift in (("clip", 0.0), ("inf_cl", 0.02))
        for seed in range(3)
    ]
    monkeypatch.setattr("benchmarks.paper.accuracy.rows", lambda name: stored)
    assert "| infcl - CLIP | +0.020 +- 0.000 |" in table_3_pairs()
    assert "| spread of CLIP over seeds | 0.100 |" in table_3_pairs()


def test_largest_batches_of_different_settings_are_rows_of_their_own(monkeypatch):
    common = {
        "model": "ViT-B-16",
        "gpus": 1,
        "pixels": "gpu",
        "loss": "inf_cl",
        "precision": "bf16",
        "checkpointing": 1,
    }
    common |= {"memory_gb": 80.0, "global_batch": 2048, "fits": 1, "peak_gib": 60.0, "commit": "a"}
    changes = ({}, {"memory_gb": 139.0}, {"precision": "amp_bf16"}, {"checkpointing": 0})
    stored = [common | change | {"global_batch": 1024 * i} for i, change in enumerate(changes, 2)]
    monkeypatch.setattr(memory, "rows", lambda name: stored if name == "largest_batch.csv" else [])
    shown = [line for line in memory.table_2().splitlines() if "measured" in line]
    assert len(set(shown)) == 4 and any("at 139 GB | infcl |" in line and "| 3k |" in line for line in shown)
    assert any("infcl, amp_bf16 |" in line for line in shown) and any(
        "infcl, no checkpointing |" in line for line in shown
    )


def test_a_table_of_losses_shows_the_newest_commit_of_each_setting(monkeypatch):
    common = {"gpus": 1, "dim": 768, "global_batch": 1024, "extra_mib": 9.0, "ratio_to_cublas": 0.5}
    common |= {"device": "h", "torch": "t", "cublas_tflops": 700.0, "repeats": 1, "std_ms": 0.0}
    times = [("inf_cl", "a", 40.0), ("clip", "a", 60.0), ("inf_cl", "b", 50.0), ("inf_cl", "a", 41.0)]
    stored = [common | {"impl": impl, "commit": commit, "median_ms": time} for impl, commit, time in times]
    monkeypatch.setattr(speed, "rows", lambda *names: stored)
    shown = lambda: speed.loss_table(1, ("inf_cl", "clip")).splitlines()[-1]  # noqa: E731
    assert shown() == "| 1,024 | 41.0 ms, 9 MiB | 60.0 ms, 9 MiB | 0.50 | a |"  # 40 and 41 are within 3%
    stored[-1]["median_ms"] = 44.0
    assert "| 40.0-44.0 ms, 9 MiB |" in shown()
    stored.append(stored[2] | {"commit": "c", "extra_mib": 8.0, "repeats": 2, "std_ms": 0.31})
    assert "| 50.0 +- 0.31 ms, 8 MiB |" in shown() and shown().endswith("| c, a |")
    assert speed.loss_origin().startswith("h, torch t, commits a, c;")
    assert speed.loss_origin().splitlines()[-2:] == ["| a | 1 | clip: 1k |", "| c | 1 | inf_cl: 1k |"]
    stored.append(stored[2] | {"commit": "d", "median_ms": "", "ratio_to_cublas": ""})
    assert shown() == "| 1,024 | x | 60.0 ms, 9 MiB |  | d, a |"


def test_a_ratio_is_of_the_newest_rows_of_one_commit(monkeypatch):
    common = {"gpus": 1, "dim": 768, "global_batch": 65536, "device": "NVIDIA H200"}
    times = [("official", "a", 1500.0), ("inf_cl", "a", 40.0), ("inf_cl", "b", 50.0), ("official", "c", 1600.0)]
    stored = [common | {"impl": impl, "commit": commit, "median_ms": time} for impl, commit, time in times]
    monkeypatch.setattr(speed, "rows", lambda name: stored if name == "loss_h200.csv" else [])
    assert "| 40.0 | 1,500 | 37.50x |" in speed.symmetry()
    stored.append(common | {"impl": "inf_cl", "commit": "c", "median_ms": 50.0})
    assert "| 50.0 | 1,600 | 32.00x |" in speed.symmetry()


def test_gradients_of_infcl_stand_beside_those_of_their_own_run(monkeypatch):
    parts = dict.fromkeys(("image", "text", "scale"), 0.0)
    common = {"device": "h", "torch": "t", "precision": "amp_bf16", "ranks": 1, "global_batch": 8, "weights": "initial"}
    stored = [
        common | parts | {"loss": loss, "commit": commit, "from_clip": distance, "tile_dtype": tile_dtype}
        for commit, distance, ours in (("a", 0.1, "fp32"), ("b", 0.2, "bf16"))
        for loss, tile_dtype in (("clip", "fp32"), ("open_clip", "fp32"), ("disco", "fp32"), ("inf_cl", ours))
    ]
    monkeypatch.setattr(accuracy, "rows", lambda name: stored)
    lines = accuracy.gradients().splitlines()[2:4]
    assert "| h, amp_bf16 | 1 | 8 | initial | 1.0e-01 | 1.0e-01 | 1.0e-01 |" in lines[0]
    assert "| h, amp_bf16, products bf16 | 1 | 8 | initial | 2.0e-01 | 2.0e-01 | 2.0e-01 |" in lines[1]


def test_measured_steps_of_one_setting_are_told_apart():
    lines = [line.split(" | ")[:2] for line in measured_steps().splitlines()[2:]]
    assert len(lines) == len({tuple(line) for line in lines})
    assert sum("a slower machine" in line[1] for line in lines) == 1


def test_steps_of_replaced_code_are_not_shown():
    assert not [row for row in planned_steps() if row["zero"] == "3" and row.get("commit") == "188be76"]
    table = measured_steps()
    assert "+58%" not in table and "parameters persistent |" in table


def test_stages_stand_beside_zero_1_of_their_commit_and_say_what_sets_them_apart(monkeypatch):
    common = {"model": "ViT-L-14", "precision": "bf16", "gpus": 4, "label": "zero 3", "zero_options": "{}"}
    common |= {"blocks": "compiled"}
    common |= {"seconds_encode": 0.4, "seconds_replay": 1.0, "peak_gib": 7.0}
    common |= {"checkpointing": "True", "micro_batch": 128, "micro_batches": 8}
    stored = [
        common | {"commit": commit, "zero": zero, "samples_per_second_per_gpu": rate} | more
        for commit, zero, rate, more in (
            ("before", 1, 490.0, {}),
            ("a", 3, 250.0, {"gpus": 2}),
            ("a", 3, 410.0, {"label": "zero 3 (host runs ahead: not kept)"}),
            ("a", 1, 510.0, {"micro_batches": 16}),
            ("a", 1, 520.0, {"checkpointing": "False"}),
            ("a", 1, 530.0, {"gpus": 8}),
            ("a", 3, 450.0, {"label": "zero 3 (another machine)", "zero_options": '{"x_persistence_y": 1}'}),
            ("a", 3, 400.0, {"blocks": "eager", "zero_options": '{"memory_efficient_linear": true}'}),
            ("a", 1, 500.0, {}),
        )
    ]
    monkeypatch.setattr(steps, "rows", lambda name: stored)
    assert [line.split(" | ")[:4] for line in steps.zero_3().splitlines()[2:]] == [
        ["| 4", "1", "", "500"],
        ["| 4", "3", "`memory_efficient_linear` true, eager", "400 (0.80 of ZeRO-1)"],
        ["| 4", "3", "another machine, all parameters persistent", "450 (0.90 of ZeRO-1)"],
    ]


def test_what_the_presets_give_comes_first_and_what_they_replaced_says_so():
    for table in (steps.reductions(), steps.one_micro_batch()):
        of_zero_1 = [
            line for line in table.splitlines() if line.startswith(("| 1 | 2 | 128 x 1 | amp_bf16 | 1", "| 2 | 1 "))
        ]
        assert "preset" in of_zero_1[0] and len(of_zero_1) > 1
    assert [line.split(" | ")[2] for line in steps.one_micro_batch().splitlines() if "replaced" in line] == [
        "replaced: stage 1 over one rank",
        "replaced: DeepSpeed's norm",
    ]
    kept = [line.split(" | ")[2] for line in steps.residents().splitlines() if line.startswith("| ViT")]
    assert ["(`auto`)" in words for words in kept] == [True, False] * (len(kept) // 2)


def test_zero_3_says_how_it_gathers_on_machines_where_it_gathers_once():
    lines = [line.split(" | ") for line in steps.zero_3_hosts().splitlines()[2:]]
    assert {line[3] for line in lines if line[2] == "3"} == {"once a step", "in each pass"}
    assert {line[3] for line in lines if line[2] == "1"} == {""}
    for loop in {line[0] for line in lines}:
        assert "once a step" in [line[3] for line in lines if line[0] == loop]
    assert {line[-1].removesuffix(" |") for line in lines}.isdisjoint(steps.EACH_PASS)


def test_each_optimizer_is_one_row():
    names = [line.split(" | ")[0] for line in steps.optimizers().splitlines() if line.startswith("| `")][1:]
    assert len(names) == len(set(names)) == 5


def test_levers_of_a_sweep_are_told_apart_and_a_profiled_step_is_none(monkeypatch):
    stored = rows("step.csv")
    row = next(
        row
        for row in stored
        if row["label"] == "batch-size 128 accum-freq 8 zero 1 compile-blocks on precision bf16" and row["text_share"]
    ) | {"commit": "of today"}
    more = [
        row | {"label": f"{row['label']} sdpa cudnn"},
        row | {"label": f"{row['label']} profile 1"},
    ]
    monkeypatch.setattr(steps, "rows", lambda name: stored + more)
    _, _, *lines = steps.levers().splitlines()  # measured last
    assert lines[0].startswith("| 128 x 8, attention cudnn")
    assert not any("of today" in line for line in lines[1:])
    assert not any(row["commit"] in line for row in stored if not row["text_share"] for line in lines)  # whole captions


def test_rings_stand_side_by_side_as_they_took_turns(monkeypatch):
    setting = {"hosts": 2, "ranks": 4, "nic_mbit": 40, "ratio": 6.4, "rows": 256, "dim": 64}
    stored = [
        setting | {"ring": ring, "nic_mbit": rate, "median_ms": time, "fastest_ms": time - 1, "commit": commit}
        for rate, commit, times in ((40, "", (100, 50, 90, 30)), (80, "a", (60, 40)))
        for ring, time in zip(("flat", "two-level") * 2, times)
    ]
    monkeypatch.setattr(speed, "rows", lambda name: stored)
    *lines, _, last = speed.rings().splitlines()[2:]
    assert lines == [
        "| 2 x 4 | 40 / 256 | 256, 64 | 100 (99) | 50 (49) | 2.0 | not kept |",
        "| 2 x 4 | 40 / 256 | 256, 64 | 90 (89) | 30 (29) | 3.0 | not kept |",
        "| 2 x 4 | 80 / 512 | 256, 64 | 60 (59) | 40 (39) | 1.5 | a |",
    ]
    assert last == "The two-level ring is 1.5 to 3.0 times faster."


def test_losses_of_many_ranks_stand_beside_one_ranks_and_a_second_run_replaces_the_first(monkeypatch):
    common = {"pairs": 64, "device": "cpu", "torch": "t", "commit": "a"}
    stored = [
        common | {"hosts": hosts, "ranks": ranks, "step": step, "loss": loss}
        for hosts, ranks, losses in ((4, 32, (9.0, 9.0)), (1, 1, (8.0, 4.0)), (4, 32, (8.0, 4.002)))
        for step, loss in enumerate(losses, 1)
    ]
    monkeypatch.setattr(accuracy, "rows", lambda name: stored)
    header, _, *lines, _, last = accuracy.many_ranks().splitlines()
    assert header == "| step | 32 ranks on 4 hosts | 1 rank |"
    assert lines == ["| 1 | 8.0000000 | 8.0000000 |", "| 2 | 4.0020000 | 4.0000000 |"]
    assert last == "Apart by 5.0e-04 at most (relative), 64 pairs a step; cpu, torch t, commit a."


@pytest.mark.parametrize("table", [steps.optimizers, steps.locked_tower])
def test_a_second_run_of_the_optimizers_replaces_the_first(monkeypatch, table):
    before = table().splitlines()
    again = [row | {"samples_per_second": 1234.0} for row in rows("optimizers.csv")]
    monkeypatch.setattr(steps, "rows", lambda name: rows(name) + again)
    after = table().splitlines()
    assert len(after) == len(before) and all(" 1234 |" in line for line in after[2:-2])
