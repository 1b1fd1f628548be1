"""benchmarks.step_losses: in whole steps of one engine only the loss is exchanged; rows, table and plot of them."""

import argparse
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import step_losses
from benchmarks.rows import append, read
from benchmarks.step_losses import COLUMNS, first_steps, installed_open_clip_loss, loss_of, measure
from tests.lib.ranks import run_ranks

PEERS = ("clip", "official_open_clip")


def measured(rank: int, world_size: int, folder: str) -> tuple[list[dict], list[float]]:
    """(a row of ours, of each peer, of a loss without memory, and of ours again; each loss of the same features)."""
    options = argparse.Namespace(model="demo", batch_size=8)
    trainer = first_steps(options, ["--device", "cpu", "--compile-blocks", "off"], Path(folder))
    peers = [loss_of(name, trainer) for name in PEERS]
    images, texts = F.normalize(torch.randn(2, 16, 64), dim=2)
    losses = [float(loss(images, texts, torch.tensor([9.0]), None)) for loss in [trainer.loss, *peers]]

    def without_memory(*features):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = [measure(trainer, call, 3, 1, 2) for call in [None, *peers]]
    rows += [measure(trainer, without_memory, 3, 1, 2), measure(trainer, None, 2, 0, 1)]
    trainer.metrics.close()
    return rows, losses


def test_each_loss_takes_whole_steps_of_one_engine_and_one_without_memory_leaves_it_usable(tmp_path):
    ((rows, losses),) = run_ranks(measured, 1, str(tmp_path))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    *fine, without, last = rows
    for row in fine:
        assert (row["global_batch"], row["repeats"], row["warm_up"]) == (24, 2, 1)
        parts = sum(row[f"seconds_{phase}"] for phase in ("encode", "loss", "replay"))
        assert (
            row["seconds_loss"] > 0
            and parts <= 1.05 * row["mean_s"]
            and all(math.isfinite(row[name]) for name in ("mean_s", "std_s"))
        )
    assert without["median_s"] is None and without["global_batch"] == 24
    assert (last["global_batch"], last["repeats"]) == (16, 1) and last["median_s"] > 0
    path = tmp_path / "rows.csv"
    for row in rows:
        append(path, [row | dict.fromkeys(("impl", "model", "device", "torch", "triton", "commit"), "a")], COLUMNS)
    assert [row["median_s"] == "" for row in read(path)] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--impl", "inf_cl,nt_xent"], "unknown loss 'nt_xent'; one of inf_cl, clip"),
        (["--impl", "official"], "pip install inf_cl==1.2.1"),
        (["--impl", "clip,official_open_clip"], "pip install open_clip_torch"),
        (["--impl", "official_open_clip", "--open-clip-loss", "none.py"], "none.py"),
    ],
)
def test_losses_that_are_not_there_are_refused_before_anything_is_trained(monkeypatch, flags, said):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(step_losses, "shared_folder", lambda: pytest.fail("a training began"))
    monkeypatch.setattr("sys.argv", ["step_losses", *flags])
    with pytest.raises(SystemExit, match=said):
        step_losses.main()


def test_open_clips_own_loss_is_the_installed_packages():
    from benchmarks.loss_impls import make

    features = [F.normalize(torch.randn(6, 8), dim=1) for _ in range(2)]
    scale, bias = torch.tensor(7.0), torch.tensor(-10.0)
    for theirs, ours in (("official_open_clip", "clip"), ("official_siglip", "siglip")):
        loss, expected = (
            make(name, None, {}, installed_open_clip_loss())(*features, scale, bias) for name in (theirs, ours)
        )
        torch.testing.assert_close(loss, expected)
