"""Worker processes: the DataLoader of both readers, its resource checks, and what it yields."""

import atexit
import os
import re
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from infcl.config import counted

if TYPE_CHECKING:
    from infcl.config import TrainConfig
    from infcl.data.plan import Share
    from infcl.data.samples import SampleDecoder

_SHARED_MEMORY = "/dev/shm"
_PREFETCH = 4  # micro-batches that each worker reads ahead

MicroBatch = dict[str, torch.Tensor]
# Its log: {"skipped": [(cause, shard, message), ...], "noted": [cause, ...], "memory_mb": [(worker, its memory), ...]}
ReadLog = dict[str, list]


class NoBatch(RuntimeError):
    """A micro-batch cannot be produced. The message is one line. `exit_code` is 65 if the data is unusable, else 1."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code

    @classmethod
    def after(cls, bad: int, last: tuple[str, str, str], *, storage_fails: bool) -> "NoBatch":
        """Return the failure after `bad` samples in a row; `last` is the entry of the last one in the log."""
        what = f"{counted(bad, 'sample')} in a row could not be used (the last: {last[0]}: {last[2]})"
        of_teacher = last[0].endswith("_teacher")
        asked = "are these the shards of --teacher-key?" if of_teacher else "is this a data set of images?"
        return cls(what) if storage_fails else cls(f"{what}; {asked}", 65)


def new_log() -> ReadLog:
    return {"skipped": [], "noted": [], "memory_mb": []}


def watch(loader: DataLoader) -> Iterator[Any]:
    """Yield the items of `loader`. Raises NoBatch if a worker returned one, or after the loader's time-out."""
    try:
        for item in loader:
            if isinstance(item, NoBatch):
                raise NoBatch(str(item), item.exit_code)  # `item` itself would be in a cycle with this frame
            yield item
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        why = "storage hangs, or --workers are too few"
        raise NoBatch(f"no batch for {loader.timeout:g} s (a third of --dist-timeout): {why}") from error


class Source(ABC):
    """The reader behind a loader: micro-batches of this rank, each with the log of its skipped samples."""

    num_samples: int  # per epoch, over all ranks
    steps_per_epoch: int
    sha256: str  # identifies the data
    about: str  # describes the size of the data
    found: dict[str, int]  # counts of problems known before the first read
    repeats = False  # whether micro-batches can be read a second time

    @abstractmethod
    def micro_batches(self, epoch: int, step: int, again: range) -> Iterator[tuple[MicroBatch, ReadLog]]:
        """Return this rank's micro-batches from `step` of `epoch` on, without an end, each with its log.

        After the M micro-batches of a step, those whose index is in `again` come a second time, bit-identical. Only a
        source that `repeats` supports that.
        """


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return torch.stack(tensors); in a worker, stack directly into shared memory, as torch's own collation does.

    Moving a batch to shared memory later would copy it again and fragment the worker's heap. After a hundred batches of
    128 images, that takes 830 MB instead of 165 MB.
    """
    if torch.utils.data.get_worker_info() is None:
        return torch.stack(tensors)
    first = tensors[0]
    shape = (len(tensors), *first.shape)
    storage = torch.UntypedStorage._new_shared(len(tensors) * first.numel() * first.element_size())
    return torch.stack(tensors, out=torch.empty(0, dtype=first.dtype).set_(storage).view(shape))


def worker_memory_mb() -> tuple[int, float]:
    """Return the number of this worker (0 in the rank itself), and the resident memory of this process in MB."""
    info = torch.utils.data.get_worker_info()
    with open("/proc/self/statm") as file:
        return info.id if info else 0, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def describe_death(error: RuntimeError, rank: int, memory_mb: Sequence[float]) -> str | None:
    """Return the message for a worker that died, or None for other errors.

    torch raises the error in a signal handler, so it can occur at any line of the rank.
    """
    words = str(error).partition("\n")[0].rstrip(". ")
    if not re.match(r"DataLoader worker \(pid\S* [\d, ]+\) (is killed|exited unexpectedly)", words):
        return None
    return (
        f"a worker of the loader of rank {rank} has died ({words}; its workers held {sum(memory_mb):,.0f} MB). If "
        "nobody killed it, the system ran out of memory: use fewer --workers, a smaller --batch-size, or more memory"
    )


@cache
def end_of_rank() -> torch.Tensor:
    """Return a bool [] in shared memory: whether this process (the rank) is exiting. All its DataLoaders share it."""
    flag = torch.zeros((), dtype=torch.bool).share_memory_()
    atexit.register(flag.fill_, True)  # runs before multiprocessing's handler, which stops the workers
    return flag


def outlive_first_sigterm(rank_ends: torch.Tensor, _worker: int) -> None:
    """Set the signal handlers of a worker: exit 30 s after the first SIGTERM, or at the second one.

    Schedulers and launchers send SIGTERM to every process of a run, but the rank still needs this worker to finish its
    step and write a checkpoint. The worker exits with status 0, because the rank treats any other exit as a failure.
    When the rank itself exits (`rank_ends`, see `end_of_rank`), it also sends SIGTERM, and its workers exit at once.
    """

    def end(_number: int, _frame: Any) -> None:
        os._exit(0)

    def first(number: int, frame: Any) -> None:
        if rank_ends:
            end(number, frame)
        signal.signal(number, end)
        signal.alarm(30)

    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGTERM, first)
    for of_the_rank in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(of_the_rank, signal.SIG_IGN)


def make_dataloader(
    dataset: Any, flags: "TrainConfig", decoder: "SampleDecoder", share: "Share", **options: Any
) -> DataLoader:
    """Return a DataLoader of the items of `dataset`, one micro-batch each, in order; pinned if there is a GPU.

    Raises:
        ValueError: this machine lacks what the workers need, see `_check_shared_memory`.
    """
    if flags.workers:
        _check_shared_memory(flags.workers, decoder.batch_bytes(share.rows), share.node_readers)
        options |= {
            "prefetch_factor": _PREFETCH,
            "timeout": 60 * flags.dist_timeout / 3,
            "worker_init_fn": partial(outlive_first_sigterm, end_of_rank()),
        }
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=flags.workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that starting an epoch does not change the global random state
        **options,
    )


def _check_shared_memory(num_workers: int, item_bytes: int, node_readers: int) -> None:
    """Raise ValueError if shared memory does not suffice: a worker would die of SIGBUS in the middle of a run."""
    free = shutil.disk_usage(_SHARED_MEMORY).free / 2**20
    needed = node_readers * num_workers * _PREFETCH * item_bytes / 2**20
    if needed > free:
        raise ValueError(
            f"{counted(node_readers, 'rank')} x {counted(num_workers, 'worker')} x {_PREFETCH} micro-batches of "
            f"{item_bytes / 2**20:,.3f} MiB need {needed:,.3f} MiB of {_SHARED_MEMORY} per node, {free:,.3f} MiB are "
            "free: use fewer --workers, a smaller "
            "--batch-size, or more shared memory (docker run --shm-size)"
        )
