"""Memory of a GPU into which the other GPUs of its host write by their copy engines.

Collectives, sends and receives of NCCL are kernels: they take multiprocessors from what computes beside them. Here the
driver issues all parts of a transfer to a stream, and none is a kernel: copies into a peer's memory, flags written
there behind them, and waiting until a flag in one's own memory has been written.

What such transfers need to be right (when memory may be written over) is up to who uses them: loss/copies.py for the
ring, megatron_patches/exchange.py for products over rows that travel.

A stream waits for a flag without end, and NCCL's watchdog sees none of it: `Watch` ends a process that waits too long.
"""

import atexit
import collections
import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from infcl.loss.links import timeout_of

ALIGNED = 256  # bytes: where what is copied begins, and flags
TELLING = 10.0  # seconds, at most, in which a process that ends says what it waited for
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


class Watch:
    """Ends this process once its GPU has not come past a mark for as long as the group waits for a message.

    describe: what it waits for; called then, by a thread, and may use streams of its own.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, describe: Callable[[], str]):
        self._seconds, self._device, self._describe = timeout_of(group).total_seconds(), device, describe
        self._newest: torch.cuda.Event | None = None
        self._here: torch.cuda.Event | None = None
        self._seen: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()

    def mark(self, event: torch.cuda.Event) -> None:
        """The GPU is to come past this event, recorded where it has come past those marked before."""
        self._newest = event
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infcl peer memory", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    def mark_here(self, stream: torch.cuda.Stream) -> None:
        """The GPU is to come past what the stream has now. Where this is called often, few events are made."""
        if self._here is None or self._here is self._seen:
            self._here = torch.cuda.Event()
        self._here.record(stream)
        self.mark(self._here)

    def _leave(self) -> None:
        """A thread that came back from CUDA while the interpreter is taken down would abort the process."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        _let_others_capture()
        nap, naps = min(1.0, self._seconds / 10), 0
        ahead = collections.deque[tuple[torch.cuda.Event, int]]()
        while not self._leaving.wait(nap):
            naps += 1  # a clock would count the time in which all ranks were stopped, to go on later
            if (newest := self._newest) is not self._seen:
                self._seen = newest  # is not recorded again
                ahead.append((newest, naps))
            try:
                while ahead and ahead[0][0].query():
                    ahead.popleft()
            except RuntimeError:
                return  # the GPU has failed, which whoever computes on it is told
            if ahead and (naps - ahead[0][1]) * nap > self._seconds:
                self._end()

    def _end(self) -> None:
        """Nothing that waits for this GPU can be ended but the process."""
        telling = threading.Thread(target=self._tell, daemon=True)  # the driver may hold up what asks it, too
        telling.start()
        telling.join(TELLING)
        os._exit(1)

    def _tell(self) -> None:
        print(f"For {self._seconds:.0f} s {self._device} has waited for another GPU.", file=sys.stderr, flush=True)
        print(self._describe(), file=sys.stderr, flush=True)


def _let_others_capture() -> None:
    """This thread's questions to CUDA do not make the CUDA graph invalid that another thread captures meanwhile."""
    relaxed = ctypes.c_int(2)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


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
