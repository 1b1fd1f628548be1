"""Streams of several GPUs, simulated, for what transfers between GPUs must be right about: who waits for what.

A stream is a queue; one of them, by chance, does its next operation. Copies move memory of this process, half of the
bytes at a time.
"""

import ctypes
import random
from contextlib import nullcontext
from unittest import mock

import torch

from infcl import gpu_watch, peer_memory


class Gpus:
    """The streams of all ranks, and what is asked of the driver and of torch for the rank that issues now."""

    def __init__(self, size: int, seed: int):
        self.chance, self.size, self.rank = random.Random(seed), size, 0
        self.queues: list[list] = []
        self.computing = [Stream(self) for _ in range(size)]

    def patched(self) -> list:
        return [
            mock.patch.object(torch.cuda, "Stream", lambda device: Stream(self)),
            mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
            mock.patch.object(torch.cuda, "Event", lambda: Event(self)),
            mock.patch.object(torch.cuda, "current_stream", lambda *_: self.computing[self.rank]),
            mock.patch.object(torch.distributed, "get_rank", lambda group: self.rank),
            mock.patch.object(torch.distributed, "get_world_size", lambda group: self.size),
            mock.patch.object(peer_memory, "Driver", lambda: self),
            mock.patch.object(peer_memory, "on_all", lambda group, own: own()),
            mock.patch.object(gpu_watch, "Watch"),
        ]

    def compute(self, operation) -> None:
        """What the rank that issues now computes."""

        def once() -> None:
            operation()

        self.issue(self.computing[self.rank].cuda_stream, once)

    def issue(self, stream: int, operation) -> None:
        """operation: is asked again later as long as it returns False."""
        self.queues[stream].append(operation)

    def copy(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        half = num_bytes // 2
        self.issue(stream, lambda: ctypes.memmove(target, source, half))
        self.issue(stream, lambda: ctypes.memmove(target + half, source + half, num_bytes - half))

    def write_flag(self, stream: int, address: int, value: int) -> None:
        self.issue(stream, lambda: ctypes.memmove(address, (value % 2**32).to_bytes(4, "little"), 4))

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        there = ctypes.c_uint32.from_address(address)
        self.issue(stream, lambda: ctypes.c_int32(there.value - value).value >= 0)

    def run(self) -> None:
        """All that was issued. Some streams go far while others stand still."""
        order = list(range(len(self.queues)))
        while any(self.queues):
            if self.chance.random() < 0.1:
                self.chance.shuffle(order)
            able = (queue for queue in map(self.queues.__getitem__, order) if queue and queue[0]() is not False)
            del next(able)[0]  # StopIteration: every stream waits


class Stream:
    def __init__(self, gpus: Gpus):
        self.gpus, self.cuda_stream = gpus, len(gpus.queues)
        gpus.queues.append([])

    def wait_event(self, event: "Event") -> None:
        reached = event.reached
        self.gpus.issue(self.cuda_stream, lambda: bool(reached))

    def synchronize(self) -> None:
        self.gpus.run()

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.gpus)
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, gpus: Gpus):
        self.gpus = gpus

    def record(self, stream: Stream | None = None) -> None:
        self.reached = reached = []
        self.gpus.issue((stream or torch.cuda.current_stream()).cuda_stream, lambda: reached.append(True))

    def query(self) -> bool:
        return bool(self.reached)
