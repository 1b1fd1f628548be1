"""The process group: device, rendezvous, and `Parallel`, the ranks and groups of this process.

`init_parallel` works under deepspeed, torchrun, srun, mpirun and, with one rank, plain `python`. First all ranks join
and compare their software and settings (rendezvous.py). Then `init_parallel` starts the process group itself (NCCL on
GPUs, gloo on CPUs), so it sets the timeout after which a hung collective ends the run. With several nodes it also
starts a heartbeat.
"""

import datetime
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from infcl.parallel.environment import binds_ranks, export_rank, read_environment, read_ranks_per_node
from infcl.parallel.heartbeat import Heartbeat
from infcl.parallel.host_limits import core_quota
from infcl.parallel.rendezvous import LOOPBACK, Node, join_all, open_store


@dataclass(frozen=True)
class Parallel:
    """Ranks, groups and device of this process.

    Attributes:
        dp_group: the group over which ZeRO averages.
        ranks_per_node: None if the nodes have different numbers of ranks.
        tp_group: the tensor-parallel ranks that share one copy of the model and see the same samples; None if every
            rank has its own copy.
        tp_host_group: the same ranks, for tensors in host memory; None on GPUs if no such tensor is sent.
        heartbeat: on the first rank of each node in a run over several nodes, else None.
        nodes: all nodes, if this module started the process group.
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
        """Number of nodes; 1 if this module did not start the process group."""
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
    run: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Parallel:
    """Start the process group, unless the caller has started one. Collective.

    Args:
        device: auto, cuda or cpu. auto selects cuda if a GPU is visible, unless DS_ACCELERATOR=cpu.
        timeout_minutes: limit of the rendezvous and of each collective. A node without a heartbeat for 1/45 of it (40 s
            of 30 minutes), or for 10 s if that is more, counts as lost.
        run: identifier that all ranks of this run have in common and other runs rarely have.
        settings: {name: value} that must be equal on all nodes.

    Returns:
        The ranks, groups and device of this process.

    Raises:
        ValueError: there is no GPU for this rank; ranks belong to another run; nodes differ in software, settings or
            devices.
        RuntimeError: ranks did not join in time.
    """
    rank, world_size, local_rank = read_environment()
    target = _choose_device(device, local_rank)
    ranks_per_node, heartbeat, nodes = read_ranks_per_node(), None, []
    if not dist.is_initialized():
        bound = binds_ranks()
        export_rank(rank, world_size, local_rank)
        if os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK and "lo" in dict(socket.if_nameindex()).values():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else that of the hostname, which may have no address
        timeout = datetime.timedelta(minutes=timeout_minutes)
        store = open_store(rank, world_size, timeout=timeout, run=run)
        own = {**settings, "device": target.type}
        nodes = join_all(store, rank, local_rank, world_size, timeout=timeout, settings=own)
        _share_cores(next(node.num_ranks for node in nodes if rank in node.ranks), bound=bound)
        if len(nodes) > 1:
            sizes = {node.num_ranks for node in nodes}
            ranks_per_node = sizes.pop() if len(sizes) == 1 else None
            if local_rank == 0:
                heartbeat = Heartbeat(store, nodes, rank, timeout=max(10.0, timeout.total_seconds() / 45))
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
    """Return the device of this rank. Set LOCAL_RANK for DeepSpeed, which reads it as the index of the GPU.

    A launcher makes all of a node's GPUs visible to each rank, or one GPU per rank, as `srun --gpus-per-task=1` does.
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


def why_no_gpu() -> str:
    """Return the end of the sentence "no GPU is visible": the reason if torch is built without CUDA, else ""."""
    return "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"


def _share_cores(num_ranks: int, *, bound: bool) -> None:
    """Limit torch's threads to this rank's share of its node's cores, unless OMP_NUM_THREADS is set.

    By default torch uses all cores in each rank of a node, and the threads wait for each other. If the launcher has
    `bound` this process, its cores are its own, but a container's quota is still for all ranks together.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        if not bound and hasattr(os, "sched_getaffinity"):  # Linux
            cores = len(os.sched_getaffinity(0))
        share = int(min(cores, core_quota())) // num_ranks
        torch.set_num_threads(min(max(1, share), torch.get_num_threads()))


def destroy_parallel(parallel: Parallel | None = None) -> None:
    """Destroy the process group. All ranks must call this, since NCCL waits for all of them."""
    if parallel is not None and parallel.heartbeat is not None:
        parallel.heartbeat.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_and_host(parallel: Parallel) -> str:
    """Return this process's name for messages: "rank 5 on worker-2", or "rank 5" on a single node."""
    if parallel.hosts == 1:
        return f"rank {parallel.rank}"
    here = next(node.host for node in parallel.nodes if parallel.rank in node.ranks)
    return f"rank {parallel.rank} on {here}"


def describe_ranks(parallel: Parallel) -> str:
    """Return "8 x cuda", or "8 x cuda (2 tensor-parallel x 4 data-parallel)"."""
    text = f"{parallel.world_size} x {parallel.device.type}"
    if parallel.tp_size == 1:
        return text
    return f"{text} ({parallel.tp_size} tensor-parallel x {parallel.dp_size} data-parallel)"


def ranks_of_host(parallel: Parallel) -> int:
    """Return the number of ranks that share a node's memory: all ranks if nodes have different numbers."""
    return parallel.ranks_per_node or parallel.world_size
