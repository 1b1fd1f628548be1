"""The process group: devices, rendezvous, and `Parallel`, the place of this process in it.

`init_parallel` works under deepspeed, torchrun, srun, mpirun and, with one rank, plain `python`. It starts the process
group itself (NCCL on GPUs, gloo on CPUs), after all ranks have joined and compared what they run (rendezvous.py). So
the time-out after which a hung collective ends the run is ours. Over several nodes a heartbeat runs from then on.
"""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from infcl.parallel.environment import (
    binds_ranks,
    export_rank,
    read_environment,
    read_ranks_per_node,
    require_hostfile,
)
from infcl.parallel.heartbeat import Heartbeat
from infcl.parallel.host_limits import core_quota
from infcl.parallel.network import use_interface
from infcl.parallel.rendezvous import Node, meet, open_store


@dataclass(frozen=True)
class Parallel:
    """Ranks, groups and device of this process.

    Attributes:
        dp_group: the group over which ZeRO averages.
        ranks_per_node: None where nodes have different numbers.
        tp_group: the tensor-parallel ranks that hold one copy of the model and see the same samples; None where every
            rank has its own copy.
        tp_host_group: the same ranks, for tensors in host memory; None on GPUs where none is sent.
        heartbeat: on the first rank of each of several nodes.
        nodes: all nodes, where this module started the process group.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dp_group: dist.ProcessGroup
    ranks_per_node: int | None = None
    tp_group: dist.ProcessGroup | None = None
    tp_host_group: dist.ProcessGroup | None = None
    heartbeat: Heartbeat | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def hosts(self) -> int:
        """Number of nodes; 1 where this module did not start the process group."""
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


def init_parallel(
    device: str = "auto",
    *,
    timeout_minutes: float = 30.0,
    host_timeout: float = 40.0,
    interface: str | None = None,
    run: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Parallel:
    """Start the process group, unless the caller has. Collective.

    Args:
        device: auto, cuda or cpu. auto is cuda where a GPU is visible, unless DS_ACCELERATOR=cpu.
        timeout_minutes: of the rendezvous and of a collective.
        host_timeout: seconds without a heartbeat after which a node is lost.
        interface: network interface for all connections.
        run: what all ranks of this run, and few others, call it.
        settings: {name: value} that must be equal on all nodes.

    Raises:
        ValueError: no GPU for this rank; ranks of another run; nodes with other software, settings or devices; a
            hostfile that does not exist; an interface that does not exist.
        RuntimeError: ranks did not join in time.
    """
    rank, world_size, local_rank = read_environment()
    target = _choose_device(device, local_rank)
    ranks_per_node, heartbeat, nodes = read_ranks_per_node(), None, []
    if not dist.is_initialized():
        bound = binds_ranks()
        export_rank(rank, world_size, local_rank)
        require_hostfile()
        use_interface(interface)
        timeout = datetime.timedelta(minutes=timeout_minutes)
        store = open_store(rank, world_size, interface=interface, timeout=timeout, run=run)
        own = {**settings, "device": target.type}
        nodes = meet(store, rank, local_rank, world_size, timeout=timeout, settings=own, gpu=_identity(target))
        _share_cores(next(node.num_ranks for node in nodes if rank < node.first_rank + node.num_ranks), bound=bound)
        if len(nodes) > 1:
            sizes = {node.num_ranks for node in nodes}
            ranks_per_node = sizes.pop() if len(sizes) == 1 else None
            if local_rank == 0:
                heartbeat = Heartbeat(store, nodes, rank, timeout=host_timeout)
        dist.init_process_group(
            "nccl" if target.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=target if target.type == "cuda" else None,
        )
    world = dist.group.WORLD
    assert world is not None, "init_process_group makes it"
    return Parallel(
        rank, world_size, local_rank, target, world, ranks_per_node, heartbeat=heartbeat, nodes=tuple(nodes)
    )


def _choose_device(device: str, local_rank: int) -> torch.device:
    """The device of this rank; tells DeepSpeed, which takes LOCAL_RANK for the number of the GPU.

    A launcher shows either all GPUs to each rank of a node, or, as `srun --gpus-per-task=1` does, to each its own.
    """
    use_cuda = device == "cuda"
    if device == "auto":
        use_cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    os.environ["DS_ACCELERATOR"] = "cuda" if use_cuda else "cpu"  # DeepSpeed reads this once, when it is imported
    if not use_cuda:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 0:
        raise ValueError(f"--device cuda: no GPU is visible{why_no_gpu()}; --device cpu runs without one")
    if local_rank >= visible > 1:
        raise ValueError(
            f"local rank {local_rank} has no GPU: it sees {visible}; start at most {visible} ranks per node, "
            "or let the scheduler show each rank one GPU (srun --gpus-per-task=1)"
        )
    index = local_rank if visible > 1 else 0
    if index != local_rank:
        for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if name == "LOCAL_RANK" or name in os.environ:
                os.environ[name] = str(index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _identity(device: torch.device) -> str | None:
    """What no two GPUs have in common; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def why_no_gpu() -> str:
    """Return the end of the sentence "no GPU is visible": a reason where torch is built without CUDA, else ""."""
    return "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"


def _share_cores(num_ranks: int, *, bound: bool) -> None:
    """Give torch in this process its share of the node's cores, unless OMP_NUM_THREADS says how many threads it has.

    By default torch takes all cores in each of a node's ranks, and its threads wait for each other. A container may
    have only some of the node's cores, for all its ranks together.

    Args:
        num_ranks: ranks of this node.
        bound: the cores that this process may run on are its own, as where mpirun and srun bind ranks.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        if not bound and hasattr(os, "sched_getaffinity"):  # Linux
            cores = len(os.sched_getaffinity(0))
        share = int(min(cores, core_quota())) // num_ranks
        torch.set_num_threads(min(max(1, share), torch.get_num_threads()))


def destroy_parallel(parallel: Parallel | None = None) -> None:
    """Leave the process group together with the other ranks: NCCL waits for all."""
    if parallel is not None and parallel.heartbeat is not None:
        parallel.heartbeat.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_and_host(parallel: Parallel) -> str:
    """Name this process for people: "rank 5 on worker-2"; "rank 5" on a single node."""
    if parallel.hosts == 1:
        return f"rank {parallel.rank}"
    here = next(node.host for node in reversed(parallel.nodes) if node.first_rank <= parallel.rank)
    return f"rank {parallel.rank} on {here}"


def describe_ranks(parallel: Parallel) -> str:
    """Return "8 x cuda", or "8 x cuda (2 tensor-parallel x 4 data-parallel)"."""
    text = f"{parallel.world_size} x {parallel.device.type}"
    if parallel.tp_size == 1:
        return text
    return f"{text} ({parallel.tp_size} tensor-parallel x {parallel.dp_size} data-parallel)"


def ranks_of_host(parallel: Parallel) -> int:
    """Return how many ranks share a node's memory; all where nodes have different numbers."""
    return parallel.ranks_per_node or parallel.world_size
