"""What a run writes and shows during training: records, sinks over samples_seen, console, profile."""

import errno
import io
import itertools
import json
import os
import re
import sys
import types
from unittest import mock

import pytest
import torch

from infcl.checkpoint.run_folder import RunFolder
from infcl.config import TrainConfig, shown_seconds
from infcl.report.records import read_records
from infcl.train.diagnostics import PhaseTimer
from infcl.train.metrics import Console, MetricsWriter, TensorBoardSink
from infcl.train.observers import WARM_UP_STEPS, StepProfiler
from tests.lib.steps import step_done

VALUES = {"loss": 1.5, "samples_per_second": 1000.0, "data_wait": 0.25, "lr": 1e-3, "logit_scale": 14.0}


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that records its calls; the real package is optional and not needed to run the tests."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def writer_in(folder, report_to="none"):
    config = TrainConfig(report_to=report_to, log_every_n_steps=2)
    (folder / "config.json").write_text(config.to_json())
    return MetricsWriter(RunFolder(folder), config, enabled=True, total_steps=4)


def write(folder, report_to="none", **extra):
    folder.mkdir(exist_ok=True)
    writer = writer_in(folder, report_to)
    writer.after_step(step_done(1, samples_seen=64, values=VALUES | extra))
    writer.after_step(step_done(2, samples_seen=128, values=VALUES | extra))
    writer.evaluation("zero_shot", 2, 128, {"top1": 0.5})
    writer.close()
    return read_records(RunFolder(folder).metrics)


def test_what_is_not_a_number_is_left_out_and_lines_stay_json(tmp_path):
    records = write(tmp_path, grad_norm=float("nan"), grad_norm_text=float("inf"), mfu=None)
    assert [record["kind"] for record in records] == ["train", "train", "zero_shot"]
    assert set(records[0]) == {"kind", "step", "samples_seen", *VALUES}


class FullDisk(io.StringIO):
    """Takes nothing, neither lines nor, at its close, what is left of them."""

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.write("")


def test_a_full_disk_is_reported_once_and_neither_stops_the_run_nor_the_sinks(tmp_path, wandb, capsys, monkeypatch):
    writer = writer_in(tmp_path, "wandb")
    monkeypatch.setattr(writer, "file", FullDisk())
    writer.after_step(step_done(1, samples_seen=64, values=VALUES))
    writer.evaluation("zero_shot", 1, 64, {"top1": 0.5})
    assert writer.lost == 2
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        writer.after_step(step_done(2, samples_seen=128, values=VALUES))  # a record and a line of the console
    writer.close()
    shown = capsys.readouterr().out
    assert shown.count("No space left on device") == 1 and "step 1/4" in shown and "zero_shot at step 1" in shown
    assert writer.lost == 5
    run = wandb.init.return_value
    assert run.log.call_count == 3 and run.finish.called


class CommError(Exception):
    """W&B's errors are no OSErrors."""


def test_a_sink_that_fails_is_reported_once_and_the_others_continue(tmp_path, wandb, capsys, monkeypatch):
    def fail(*_):
        raise CommError("the service is gone")

    writer = writer_in(tmp_path, "wandb")
    kinds = []
    writer.sinks.append(types.SimpleNamespace(log=lambda kind, *_: kinds.append(kind), close=lambda: kinds.append("")))
    for name in ("log", "finish"):
        monkeypatch.setattr(writer.sinks[0].run, name, fail)
    writer.after_step(step_done(1, samples_seen=64, values=VALUES))
    writer.close()
    assert writer.lost == 2 and kinds == ["train", ""] and writer.file.closed
    shown = capsys.readouterr().out
    assert shown.count("CommError: the service is gone") == 1 and "step 1/4" in shown


def test_tensorboard_has_the_curves_over_samples_seen_and_forgets_what_a_resumed_run_repeats(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(10)  # names of event files begin with the time, and are read in their order
    monkeypatch.setattr(event_file_writer, "time", types.SimpleNamespace(time=lambda: float(next(seconds))))
    for seen, shown in ((0, (64, 128, 192)), (128, (192, 256)), (64, (128,))):
        sink = TensorBoardSink(tmp_path, seen)
        for samples in shown:
            sink.log("train", samples, {"loss": float(seen)})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(64, 0.0), (128, 64.0)]


def test_wandb_gets_the_same_curves_and_a_resumed_run_continues_its_own(tmp_path, wandb):
    write(tmp_path, "wandb")
    write(tmp_path, "wandb")
    starts, run = [call.kwargs for call in wandb.init.call_args_list], wandb.init.return_value
    assert starts[0]["id"] == starts[1]["id"] and starts[0]["resume"] == "allow" and starts[0]["dir"] == str(tmp_path)
    run.define_metric.assert_any_call("*", step_metric="samples_seen")
    logged = [call.args[0] for call in run.log.call_args_list]
    assert logged[1]["train/loss"] == 1.5 and [values["samples_seen"] for values in logged[:3]] == [64, 128, 128]
    assert logged[2] == {"zero_shot/top1": 0.5, "samples_seen": 128} and run.finish.call_count == 2


def test_without_a_terminal_the_first_steps_every_nth_and_the_last_have_a_line(capsys):
    """A start in the middle of a run (step 11 here) has first steps too."""
    console = Console(19, 4, terminal=False)
    for step in range(11, 19):
        console.step(step, VALUES | {"mfu": 0.4})
    console.step(19, {name: VALUES[name] for name in VALUES if name not in ("loss", "logit_scale")})  # not finite
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{n}/19" for n in (11, 12, 13, 16, 19)]
    for shown in ("loss 1.5000", "1,000 samples/s", "MFU 40.0%", "data wait 25%", "left 0:00", "lr 1.00e-03"):
        assert shown in lines[3]
    assert "loss nan" in lines[4] and "scale nan" in lines[4]
    assert [shown_seconds(seconds) for seconds in (59, 61, 7325)] == ["0:59", "1:01", "2:02:05"]


def test_the_time_left_is_that_of_steps_at_the_mean_rate_with_their_evaluations(capsys, monkeypatch):
    """Steps of 1 s; an evaluation of 5 s after every fifth step. A resumed run begins with its first step."""
    now = [0.0]
    monkeypatch.setattr("infcl.train.metrics.time.perf_counter", lambda: now[0])
    console = Console(30, 1, terminal=False)
    for step in range(10, 31):
        now[0] += 1 + 5 * (step % 5 == 1)
        console.step(step, VALUES)
    left = re.findall(r"left ([\d:]+)", capsys.readouterr().out)
    assert left[0] == shown_seconds(6 * 19) and left[9::5] == ["0:20", "0:10", "0:00"] and len(left) == 20


def test_a_closed_output_takes_nothing_and_raises_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)  # as in a process that was started without it
    console = Console(5, 1)
    console.step(1, VALUES)
    console.say("a message")
    console.close()


def test_in_a_terminal_there_is_a_bar_that_brackets_in_messages_do_not_disturb(capsys):
    console = Console(5, 2, terminal=True)
    console.step(1, VALUES)
    console.say("a [bold] message")
    console.step(2, VALUES)
    console.close()
    output = capsys.readouterr().out
    assert "a [bold] message" in output and "2/5" in output and "loss 1.5000" in output


def test_the_profile_is_of_the_steps_after_the_warm_up(tmp_path):
    timer = PhaseTimer(torch.device("cpu"))
    profiler = StepProfiler(2, tmp_path, on_gpu=False, enabled=True)
    news = []
    for _ in range(WARM_UP_STEPS + 4):
        timer.mark("encode")
        torch.ones(64, 64) @ torch.ones(64, 64)
        step = step_done(phases=timer.read())
        profiler.after_step(step)
        news.append(step.news)
    assert [index for index, text in enumerate(news) if text] == [WARM_UP_STEPS + 1]
    table = (tmp_path / "table.txt").read_text()
    assert "mean of 2 steps" in table and "aten::mm" in table and "phase/encode" in table
    assert profiler.close() is None


def test_a_profile_that_cannot_be_written_or_has_no_steps_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    for count, reported in ((WARM_UP_STEPS + 1, "could not be written (Not a directory)"), (1, "ended after 1 step")):
        profiler = StepProfiler(1, tmp_path / "file" / "profile", on_gpu=False, enabled=True)
        steps = [step_done(phases={"data": 1.0}) for _ in range(count)]
        for step in steps:
            profiler.after_step(step)
        assert reported in "".join([*steps[-1].news, profiler.close() or ""])


def test_a_record_after_a_torn_line_is_not_lost_with_it(tmp_path):
    write(tmp_path)
    path = RunFolder(tmp_path).metrics
    whole = path.read_text()
    path.write_text(whole[: -len(whole.splitlines()[-1]) // 2 - 1])  # within the last record
    write(tmp_path)
    assert len(path.read_text().splitlines()) == len(whole.splitlines()) * 2
    assert [r["step"] for r in read_records(path)] == [1, 2, *(r["step"] for r in map(json.loads, whole.splitlines()))]
