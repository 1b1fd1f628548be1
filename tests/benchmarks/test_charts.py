"""The charts of the docs are drawn from the raw files."""

import pytest

from benchmarks.charts import CHARTS, overview
from benchmarks.rows import append


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_drawn_from_the_raw_results(name, tmp_path):
    CHARTS[name].draw(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000


def test_a_curve_shows_the_last_row_of_each_setting_and_no_row_that_ran_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.rows.RESULTS", tmp_path)
    common = {"gpus": 1, "dim": 768, "impl": "inf_cl", "extra_mib": 2048.0}
    times = [(8192, 4.0), (16384, 9.0), (8192, 5.0), (32768, ""), (4096, 1.0)]
    append(tmp_path / "loss_h200.csv", [common | {"global_batch": batch, "median_ms": ms} for batch, ms in times])
    trainer = {"program": "infcl", "blocks": "eager", "gpus": 1, "model": "ViT-L-14", "precision": "amp_bf16"}
    trainer |= {"status": "ok", "checkpointing": 0, "micro_batch": 128, "accum_freq": 1}
    append(tmp_path / "peers_train.csv", [trainer | {"samples_per_second": rate} for rate in (700.0, 740.0)])
    time, memory, trainers = overview().values()
    assert time == {"infcl": [(8192, 5.0), (16384, 9.0)]} and memory == {"infcl": [(8192, 2.0), (16384, 2.0)]}
    assert trainers == {"infcl, eager": [(740.0,)]}
