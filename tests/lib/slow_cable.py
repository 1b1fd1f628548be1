"""A cable with a delay, for kernels without tc's netem: python slow_cable.py NETNS DEVICE NETNS DEVICE MS JITTER_MS

Makes a TAP device in each of two network namespaces and forwards frames between them in order, each delayed by
MS +- JITTER_MS. Prints "ready" when the devices exist. They are removed when it ends. Needs Linux and root.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

CLONE_NEWNET, TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0002, 0x1000


def tap(namespace: str, device: str) -> int:
    """Make a TAP device; return a file descriptor to read the frames that it sends and write those it receives."""
    with open(f"/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return file


def carry(ends: list[int], seconds: float, jitter: float) -> None:
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # per end: (arrival time, frame)
    while True:
        next_at = min((queue[0][0] for queue in under_way if queue), default=None)
        wait = None if next_at is None else max(0.0, next_at - time.monotonic())
        for end in select.select(ends, [], [], wait)[0]:
            queue = under_way[1 - ends.index(end)]
            arrives = time.monotonic() + seconds + random.uniform(-jitter, jitter)
            queue.append((max(arrives, queue[-1][0] if queue else 0.0), os.read(end, 65536)))
        for end, queue in zip(ends, under_way):
            while queue and queue[0][0] <= time.monotonic():
                try:
                    os.write(end, queue.popleft()[1])
                except OSError:
                    pass  # the device is down or full: the frame is lost, as on a cable


if __name__ == "__main__":
    ends = [tap(*sys.argv[1:3]), tap(*sys.argv[3:5])]
    print("ready", flush=True)
    carry(ends, *(float(text) / 1000 for text in sys.argv[5:7]))
