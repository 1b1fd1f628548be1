"""Memory of a GPU into which the other GPUs of its host write by their copy engines.

Collectives, sends and receives of NCCL are kernels: they take multiprocessors from what computes beside them. Here the
driver issues all parts of a transfer to a stream, and none is a kernel: copies into a peer's memory, flags written
there behind them, and waiting until a flag in one's own memory has been written.

What such transfers need to be right (when memory may be written over) is up to who uses them: loss/copies.py for the
ring, megatron_patches/exchange.py for products over rows that travel.

A stream waits for a flag without end, and NCCL's watchdog sees none of it: gpu_watch.py ends a process that waits too
long.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist

ALIGNED = 256  # bytes: where what is copied begins, and flags
_BITS = 0xFFFFFFFF  # of a flag
_Result = TypeVar("_Result")


_rendezvous = 0  # how often this process has shared memory, with any group


class RankFailed(RuntimeError):
    """One rank of a group failed, and this is raised on all."""


def may_wait(device: torch.device) -> bool:
    """Whether streams may wait for flags now. A captured CUDA graph would, replayed, find those that were written long
    ago, and what was sent before its capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def on_peers(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], _Result]
) -> tuple[_Result | None, str | None]:
    """(what `make` returns on every rank, None), or (None, why GPUs cannot share memory here). Collective."""
    if not reach_each_other(group, device):
        return None, "a rank does not see another's GPU, or cannot write into its memory over NVLink"
    try:
        return make(), None
    except RankFailed as error:  # containers may forbid what sharing memory needs
        return None, str(error)


def reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every GPU of the group can write into every other's memory, over NVLink. Collective.

    Hosts where such writes do not arrive have NCCL_P2P_DISABLE=1, which holds here too. A rank must see all GPUs of its
    group: with CUDA_VISIBLE_DEVICES naming its own alone they are taken for out of reach.
    """
    if torch.version.hip is not None:
        return False  # what writes is CUDA's driver
    visible = range(torch.cuda.device_count())
    gpus = {f"{socket.gethostname()} {torch.cuda.get_device_properties(index).uuid}": index for index in visible}
    used = _gathered(next(name for name, index in gpus.items() if index == device.index), group)
    others = [gpus.get(name) for name in used if gpus.get(name) != device.index]
    able = len(set(used)) == len(used) and os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0")
    able &= all(
        other is not None and torch.cuda.can_device_access_peer(device.index, other) and _in_order(device.index, other)
        for other in others
    )
    return all(_gathered(able, group))


def _in_order(gpu: int, other: int) -> bool:
    """Whether a flag that one GPU writes into the other's memory is seen there after what was copied before it.

    So it is over NVLink, which is told by the atomics that only it carries. Over PCIe the other GPU may reorder what
    arrives, and most cannot be told to flush it first (CUDA's driver API, CU_STREAM_WAIT_VALUE_FLUSH).
    """
    cuda, handles, value = ctypes.CDLL("libcuda.so.1"), (ctypes.c_int * 2)(), ctypes.c_int()
    for place, index in enumerate((gpu, other)):
        if cuda.cuDeviceGet(ctypes.byref(handles, place * ctypes.sizeof(ctypes.c_int)), index):
            return False
    native_atomics = 3
    failed = cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), native_atomics, handles[0], handles[1])
    return not failed and bool(value.value)


def allocate(
    num_bytes: int, flags: slice, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Memory that all ranks of the group share: this rank's, uint8 [num_bytes], and the addresses of every rank's.

    flags: the bytes of it that begin as zeros. All ranks at once, each waiting for its GPU first; RankFailed on all
    where one cannot.
    """
    global _rendezvous

    def reserve() -> torch.Tensor:
        from torch.distributed._symmetric_memory import empty

        _check_socket()
        torch.cuda.synchronize(device)
        try:
            return empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:  # out of memory, unless torch's allocator holds what is free; not always by that name
            torch.cuda.empty_cache()
            return empty(num_bytes, dtype=torch.uint8, device=device)

    def share() -> list[int]:
        from torch.distributed._symmetric_memory import rendezvous

        with _no_multicast():
            addresses = list(rendezvous(memory, group).buffer_ptrs)
        if len(addresses) != dist.get_world_size(group) or addresses[dist.get_rank(group)] != memory.data_ptr():
            raise RuntimeError("torch shares memory that lies elsewhere than its tensor")
        memory[flags].zero_()
        torch.cuda.synchronize(device)
        return addresses

    memory, counts = on_all(group, reserve), _gathered(_rendezvous, group)
    if len(set(counts)) > 1:  # by this number torch's ranks find each other, else wait for their store's time-out
        raise RankFailed(f"ranks 0.. have shared memory {counts} times before, with other groups too")
    _rendezvous += 1
    return memory, on_all(group, share)  # all GPUs have ended what they did before, and zeroed their flags


def try_flags(driver: "Driver", stream: int, targets: Iterable[int], own: int) -> None:
    """Flags that change nothing: RuntimeError where the driver refuses them. They are zeros yet, at all addresses."""
    for address in targets:
        driver.write_flag(stream, address, 0)
    driver.wait_flag(stream, own, 0)


def _check_socket() -> None:
    """torch's ranks pass each other handles over sockets, whose path it copies to where Linux has 108 bytes for it."""
    folder = next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")
    path = f"{folder}/symm_mem-{os.getpid()}"
    if len(os.fsencode(path)) > 107:
        raise RuntimeError(f"the path of a socket, {path}, has more than 107 bytes: a shorter TMPDIR helps")


@contextlib.contextmanager
def _no_multicast() -> Iterator[None]:
    """torch would set up multicast for each piece of memory: nothing here uses it, and what it may do was not tried."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def on_all(group: dist.ProcessGroup, own: Callable[[], _Result]) -> _Result:
    """What `own` returns, once every rank's has; where one rank's fails, the others would wait for it: all raise."""
    result = problem = cause = None
    try:
        result = own()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # a library or a symbol is missing; memory
        problem, cause = f"{type(error).__name__}: {error}", error
    for rank, told in enumerate(_gathered(problem, group)):
        if told is not None:
            raise RankFailed(f"rank {rank} of {dist.get_world_size(group)}: {told}") from cause
    return cast(_Result, result)


def _gathered(value, group: dist.ProcessGroup) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Driver:
    """CUDA's driver. `stream`: a torch.cuda.Stream's cuda_stream; addresses: of any GPU that this process reaches."""

    def __init__(self):
        cuda = ctypes.CDLL("libcuda.so.1")
        self._copy, self._write, self._wait = (
            cuda.cuMemcpyDtoDAsync_v2,
            cuda.cuStreamWriteValue32_v2,
            cuda.cuStreamWaitValue32_v2,
        )
        stream, address, value, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
        self._copy.argtypes = (address, address, size, stream)
        self._write.argtypes = self._wait.argtypes = (stream, address, value, value)

    def copy(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        _check(self._copy(target, source, num_bytes, stream))

    def write_flag(self, stream: int, address: int, value: int) -> None:
        """After all that the stream did before: who sees the value sees that too."""
        _check(self._write(stream, address, value & _BITS, 0))

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        """Until the 32 bits there are at least `value`, by their difference's sign: numbers may begin again."""
        _check(self._wait(stream, address, value & _BITS, 0))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"a transfer to another GPU failed with CUDA's error {error}")
