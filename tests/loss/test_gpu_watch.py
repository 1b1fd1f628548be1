"""A GPU that waits too long for another ends its process, which says before what is missing."""

import os
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl import gpu_watch
from infcl.gpu_watch import Watch
from infcl.loss import sends
from infcl.loss.links import Link

CUDA0 = torch.device("cuda", 0)

NEVER, FAILS = float("inf"), -1


class Ended(BaseException):
    pass


class Naps:
    """In the place of Watch's `_leaving`: `at` is called with the number of each nap, and nothing is waited for."""

    def __init__(self, last: int, at=lambda nap: None):
        self.last, self.at, self.nap = last, at, 0

    def wait(self, seconds: float) -> bool:
        self.nap += 1
        self.at(self.nap)
        return self.nap > self.last


def watched(marks: dict[int, float], naps: int, describe=lambda: "rank 3 is missing", **options) -> int | None:
    """The nap at which the process ended. marks: the nap at which an event is marked -> that at which it has passed."""

    def at(nap: int) -> None:
        if nap in marks:
            watch.mark(lambda: has_passed(nap))

    def has_passed(nap: int) -> bool:
        if marks[nap] == FAILS:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return watch._leaving.nap >= marks[nap]

    with (
        mock.patch.object(gpu_watch, "timeout_of", return_value=timedelta(seconds=600)),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(gpu_watch, "_let_others_capture"),
        mock.patch.object(os, "_exit", side_effect=Ended),
    ):
        watch = Watch("the group", CUDA0, describe, **options)
        watch._thread, watch._leaving = threading.current_thread(), Naps(naps, at)
        try:
            watch._run()
        except Ended:
            assert os._exit.call_args.args == (1,)
            return watch._leaving.nap
    return None


def test_a_gpu_that_does_not_come_past_a_mark_ends_the_process_and_says_what_is_missing(capsys):
    assert watched({5: 5, 7: NEVER}, 2000) == 7 + 601
    assert watched({5: 400, 300: NEVER, 301: NEVER}, 2000) == 300 + 601, "each from its own mark on"
    heading = "For 541 s cuda:0 has waited for another GPU; after 600 s this process ends."
    assert capsys.readouterr().err == 2 * f"{heading}\nrank 3 is missing\n"


def test_what_comes_after_it_was_said_to_be_missing_ends_no_process(capsys):
    assert watched({5: 5 + 570, 580: NEVER}, 1150) is None
    assert capsys.readouterr().err.count("rank 3 is missing") == 2, "once for each mark"


def test_marks_between_two_looks_share_an_event_and_what_was_looked_at_is_not_recorded_again():
    made, recorded = [], []

    class Event:
        def __init__(self):
            made.append(self)

        def record(self, stream):
            recorded.append((made.index(self), stream))

        def query(self):
            return True

    with (
        mock.patch.object(gpu_watch, "timeout_of", return_value=timedelta(seconds=600)),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(gpu_watch, "_let_others_capture"),
    ):
        watch = Watch("the group", CUDA0, str)
        watch._thread = threading.current_thread()
        watch._leaving = Naps(3, lambda nap: [watch.mark_here(f"nap {nap}") for _ in range(2)])
        watch._run()
    looks = [(0, "nap 1"), (0, "nap 1"), (1, "nap 2"), (1, "nap 2"), (2, "nap 3"), (2, "nap 3"), (3, "nap 4")]
    assert recorded[:7] == looks


def test_others_have_their_grace_to_end_the_process():
    assert watched({5: 5, 7: NEVER}, 2000, grace=30.0) == 7 + 631


def test_long_work_and_long_idleness_end_no_process():
    assert watched({5: 5 + 600, 6: 6 + 600, 3000: 3000}, 10_000) is None


def test_the_process_ends_though_what_is_missing_cannot_be_read(capsys):
    never, before = threading.Event(), set(threading.enumerate())
    with mock.patch.object(gpu_watch, "TELLING", 0.01):
        assert watched({1: NEVER}, 2000, describe=never.wait) == 602
    never.set()
    for telling in set(threading.enumerate()) - before:
        telling.join()
    assert "cuda:0 has waited" in capsys.readouterr().err


def test_the_watch_begins_with_the_first_mark_and_ends_with_the_process():
    with (
        mock.patch.object(gpu_watch, "timeout_of", return_value=timedelta(hours=1)),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(gpu_watch, "_let_others_capture"),
        mock.patch.object(gpu_watch.atexit, "register") as at_exit,
    ):
        watch = Watch("the group", CUDA0, str)
        for _ in range(2):
            watch.mark(lambda: True)
        thread, (at_end,) = watch._thread, at_exit.call_args.args
        assert thread.is_alive() and thread.daemon and at_exit.call_count == 1
        at_end()
    assert not thread.is_alive()


def test_a_gpu_that_failed_is_watched_no_more():
    assert watched({1: FAILS, 2: NEVER}, 2000) is None


class Work:
    """Of NCCL's, not yet completed."""

    done = False

    def is_completed(self) -> bool:
        return self.done


def sends_of_rank_0(config: str, works: list[Work], capturing: bool = False) -> mock.Mock:
    """What is watched of messages around a ring of ranks 0 to 2: gpu_watch.Watch's stand-in."""
    sends._sends_of.cache_clear()
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
        mock.patch.object(gpu_watch, "Watch") as watch,
    ):
        for step, work in enumerate(works):
            sends.watch(work, Link("the group", 1, 2), CUDA0, f"'block 0' of ring step {step}")
    return watch


def test_the_oldest_message_of_nccl_s_that_has_not_come_is_named_with_both_neighbours():
    works = [Work() for _ in range(5)]
    works[0].done = works[1].done = True
    watch = sends_of_rank_0("cpu:gloo,cuda:nccl", works)
    group, device, missing = watch.call_args.args
    assert (group, device) == ("the group", CUDA0)
    assert [call.args[0] for call in watch.return_value.mark.call_args_list] == [work.is_completed for work in works]
    with mock.patch.object(dist, "get_rank", return_value=0):
        works[2].done = True
        assert missing() == (
            "'block 0' of ring step 3 has not come from rank 2 to rank 0, or could not be sent to rank 1 (global "
            "ranks): one of them ended, hangs, or waits for one that does."
        )
        works[3].done = works[4].done = True
        assert "all messages of its ring have come" in missing()


def test_messages_that_have_come_are_forgotten():
    with mock.patch.object(gpu_watch, "Watch"):
        watched = sends._Sends("the group", CUDA0)
    works = [Work() for _ in range(4)]
    for work in works[:3]:
        watched.add(work, Link("the group", 1, 2), "a block")
    works[0].done = works[1].done = True
    watched.add(works[3], Link("the group", 1, 2), "a block")
    assert [work for work, *_ in watched._under_way] == works[2:]


@pytest.mark.parametrize("config, capturing", [("cpu:gloo,cuda:gloo", False), ("cpu:gloo,cuda:nccl", True)])
def test_other_messages_are_not_watched(config, capturing):
    """gloo's raise by themselves; a work that a CUDA graph captures cannot be asked."""
    sends_of_rank_0(config, [Work()], capturing).assert_not_called()
