"""Ranks, devices and seeds: the only place that reads the launcher's environment.

`init_parallel` works under deepspeed, torchrun, srun, mpirun and, with one rank, plain `python`. It starts the process
group itself (NCCL on GPUs, gloo on CPUs) so that the time-out after which a hung collective ends the run is ours, after
all ranks have met and said what they run (cluster/meeting.py); on several hosts it watches that all stay (watch.py).
"""

import contextlib
import datetime
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from infcl.parallel.control_groups import core_quota
from infcl.parallel.heartbeat import HostWatch
from infcl.parallel.rendezvous import LOOPBACK, Node, interface_address, meet, open_store, require_hostfile

# launcher -> its names of (rank, world size, local rank); the first whose rank is set is taken
_ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # deepspeed, torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)
# torchrun, deepspeed, mpirun, srun: how many ranks this node has; "8(x2)" is Slurm's "8 on each of two nodes"
_NODE_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE")

_SPOKEN, _HEARD = "mistake is told", "mistake was heard"  # in the group's store
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Parallel:
    """Where this process stands. `dp_group` is the group over which ZeRO averages.

    ranks_per_node: None where nodes have different numbers. tp_group: the tensor-parallel ranks that hold one copy of
    the model and see the same samples, None where every rank has its own. tp_host_group: the same ranks, for
    tensors in host memory (None on GPUs where none is sent). watch: on the first rank of each of several hosts. nodes:
    all hosts, where this module started the process group.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dp_group: dist.ProcessGroup
    ranks_per_node: int | None = None
    tp_group: dist.ProcessGroup | None = None
    tp_host_group: dist.ProcessGroup | None = None
    watch: HostWatch | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def hosts(self) -> int:
        """How many, 1 where this module did not start the process group."""
        return max(1, len(self.nodes))

    @property
    def dp_rank(self) -> int:
        return dist.get_rank(self.dp_group)

    @property
    def dp_size(self) -> int:
        return dist.get_world_size(self.dp_group)

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else dist.get_rank(self.tp_group)

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)


def why_no_gpu() -> str:
    """Behind "no GPU is visible": nothing, unless torch could not see one."""
    return "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"


def read_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) as the launcher set them; (0, 1, 0) without a launcher."""
    for names in _ENVIRONMENTS:
        if names[0] in os.environ:
            rank, world_size, local_rank = (
                int(os.environ.get(name, default)) for name, default in zip(names, ("0", "1", "0"))
            )
            return rank, world_size, local_rank
    return 0, 1, 0


def read_ranks_per_node() -> int | None:
    """Ranks on each node, where the launcher says it and all nodes have as many."""
    for name in _NODE_SIZES:
        if found := re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(name, "")):
            return int(found[1])
    return None


def init_parallel(
    device: str = "auto",
    *,
    timeout_minutes: float = 30.0,
    host_timeout: float = 40.0,
    interface: str | None = None,
    run: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Parallel:
    """Start the process group. `device` is auto, cuda or cpu; ValueError when cuda is asked for and not there.

    auto is cuda where there is a GPU, unless DS_ACCELERATOR=cpu says otherwise. host_timeout: seconds of silence after
    which a host is lost. interface: the network interface that all connections use. run: what all ranks of this run,
    and few others, call it; ranks that meet another one's raise ValueError, as do hosts whose `settings` or devices are
    not the same, and a hostfile given to deepspeed that is not there.
    """
    rank, world_size, local_rank = read_environment()
    use_cuda = device == "cuda"
    if device == "auto":
        use_cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    if use_cuda:
        visible = torch.cuda.device_count()
        if visible == 0:
            raise ValueError(f"--device cuda: no GPU is visible{why_no_gpu()}; --device cpu runs without one")
        if local_rank >= visible:
            raise ValueError(f"local rank {local_rank} has no GPU: {visible} visible; start at most {visible} per host")
        torch.cuda.set_device(local_rank)
    os.environ["DS_ACCELERATOR"] = "cuda" if use_cuda else "cpu"  # DeepSpeed reads this once, when it is imported
    target = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    ranks_per_node, watch, nodes = read_ranks_per_node(), None, []
    if not dist.is_initialized():
        bound = _ENVIRONMENTS[0][0] not in os.environ  # by mpirun and srun: deepspeed and torchrun say RANK
        for name, value in zip(_ENVIRONMENTS[0], (rank, world_size, local_rank)):
            os.environ.setdefault(name, str(value))
        require_hostfile()
        _use_interface(interface)
        timeout = datetime.timedelta(minutes=timeout_minutes)
        store = open_store(rank, world_size, interface=interface, timeout=timeout, run=run)
        said = {**settings, "device": target.type}
        nodes = meet(store, rank, local_rank, world_size, timeout=timeout, settings=said)
        _share_cores(next(node.num_ranks for node in nodes if rank < node.first_rank + node.num_ranks), bound=bound)
        if len(nodes) > 1:
            sizes = {node.num_ranks for node in nodes}
            ranks_per_node = sizes.pop() if len(sizes) == 1 else None
            if local_rank == 0:
                watch = HostWatch(store, nodes, rank, timeout=host_timeout)
        dist.init_process_group(
            "nccl" if use_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=target if use_cuda else None,
        )
    world = dist.group.WORLD
    assert world is not None, "init_process_group makes it"
    return Parallel(rank, world_size, local_rank, target, world, ranks_per_node, watch=watch, nodes=tuple(nodes))


def _share_cores(num_ranks: int, *, bound: bool) -> None:
    """Leave this process its part of the host's cores, unless OMP_NUM_THREADS says how many threads it may have.

    By default torch takes all cores in each of a host's ranks, and its threads wait for each other. A container may
    have a part of the host's cores: all its ranks together. bound: what this process may run on is its own alone, as
    where mpirun and srun bind ranks.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        if not bound and hasattr(os, "sched_getaffinity"):  # Linux
            cores = len(os.sched_getaffinity(0))
        share = int(min(cores, core_quota())) // num_ranks
        torch.set_num_threads(min(max(1, share), torch.get_num_threads()))


def _use_interface(interface: str | None) -> None:
    """Tell gloo and NCCL. Without an interface, ranks of one host (MASTER_ADDR is the loopback) use the loopback."""
    if interface is not None:
        interface_address(interface)  # or it is a mistake
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    elif os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:
        if "lo" in dict(socket.if_nameindex()).values():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def destroy_parallel(parallel: Parallel | None = None) -> None:
    """Leave the process group, as the other ranks do: NCCL's waits for all."""
    if parallel is not None and parallel.watch is not None:
        parallel.watch.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def describe_failure(parallel: Parallel, error: Exception) -> str:
    """One line for a rank that failed among several hosts: where it ran, why it failed, which ranks are whose."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{rank_and_host(parallel)}: {first_line}; the hosts: {', '.join(map(str, parallel.nodes))}"


def rank_and_host(parallel: Parallel) -> str:
    """This process for people: "rank 5 on worker-2"; of one host "rank 5"."""
    if parallel.hosts == 1:
        return f"rank {parallel.rank}"
    here = next(node.host for node in reversed(parallel.nodes) if node.first_rank <= parallel.rank)
    return f"rank {parallel.rank} on {here}"


def report_mistake(program: str, error: Exception) -> int:
    """One line about a user's mistake, from one rank; the exit code 2 for all.

    Ranks that have met hear from rank 0 that it speaks. Before that, launchers end the other ranks within seconds once
    one has ended, so those wait. One that is still there then speaks itself: the mistake is of its host alone (of a
    host's ranks the first speaks first).
    """
    rank, world_size, local_rank = read_environment()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if rank == 0:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        if store is not None:
            store.set(_SPOKEN, "")
            _wait(5, lambda: store.add(_HEARD, 0) >= world_size - 1)  # the store may end with this process
    elif not _wait(5 if local_rank == 0 else 10, lambda: store is not None and store.check([_SPOKEN])):
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    elif store is not None:
        store.add(_HEARD, 1)
    return 2


def _wait(seconds: float, until: Callable[[], bool]) -> bool:
    """Whether that came in time; a store that has ended with its process tells nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(dist.DistError):
            if until():
                return True
        time.sleep(0.1)
    return False


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed python, numpy and torch (all devices); `deterministic` makes torch refuse what it cannot repeat bitwise.

    Compiled blocks then take their kernels' shapes by rule, not by timing them. Call it before anything is compiled.
    Memory that nothing has written yet is not filled, as torch then would: nothing here reads any, and DeepSpeed's
    buckets, reserved whole, would take up to 2 GB and most of a small model's step.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # read when torch's compiler is imported
        torch.use_deterministic_algorithms(True)
        of_memory: Any = torch.utils.deterministic
        of_memory.fill_uninitialized_memory = False


def micro_batch_seed(seed: int, step: int, micro_batch: int, dp_rank: int) -> int:
    """The seed under which a micro-batch is encoded: the same in both passes, another for every (step, rank, index)."""
    words = np.random.SeedSequence((seed, step, micro_batch, dp_rank)).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


def describe_ranks(parallel: Parallel) -> str:
    """ "8 x cuda", or "8 x cuda (2 tensor-parallel x 4 data-parallel)"."""
    text = f"{parallel.world_size} x {parallel.device.type}"
    if parallel.tp_size == 1:
        return text
    return f"{text} ({parallel.tp_size} tensor-parallel x {parallel.dp_size} data-parallel)"


def from_first_rank(own: Callable[[], _Answer]) -> _Answer:
    """What `own` returns on rank 0, on every rank; or the exception that it raises there. Collective."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = own()
        except Exception as error:  # the other ranks wait to be told
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return cast(_Answer, told[0])


def join_parts(parallel: Parallel, part: torch.Tensor) -> torch.Tensor:
    """[n, ...] of each of the T tensor-parallel ranks -> [T n, ...], theirs one behind another. Collective.

    Where `part` lies: on the device, or in host memory (`tp_host_group`), pinned as it is.
    """
    if parallel.tp_size == 1:
        return part
    group = parallel.tp_group if part.is_cuda else parallel.tp_host_group
    assert group is not None, "None would be all ranks"
    shape = parallel.tp_size * len(part), *part.shape[1:]
    whole = torch.empty(shape, dtype=part.dtype, device=part.device, pin_memory=part.is_pinned())
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def mean_over(group: dist.ProcessGroup | None, value: torch.Tensor) -> torch.Tensor:
    """Mean of a float tensor over the ranks of `group` (None: all); a new tensor."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def max_over(group: dist.ProcessGroup | None, values: Sequence[float], device: torch.device) -> list[float]:
    """Elementwise largest values of any rank of `group` (None: all)."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
