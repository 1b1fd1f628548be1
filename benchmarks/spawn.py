"""Ranks on this host without a launcher, a process each."""

import contextlib
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import torch


def on_ranks(function: Callable, world_size: int, *arguments: Any) -> None:
    """function(rank, *arguments) on each, with what `init_process_group` and `init_parallel` read from a launcher; in
    this process where there is one rank only."""
    shared = (function, world_size, _free_port(), arguments)
    if world_size == 1:
        _start(0, *shared)
    else:
        torch.multiprocessing.spawn(_start, shared, nprocs=world_size)


def _start(rank: int, function: Callable, world_size: int, port: int, arguments: tuple) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank, *arguments)


def _free_port() -> int:
    """Return a port below those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
