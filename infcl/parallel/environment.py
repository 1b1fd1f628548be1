"""The launcher's environment: rank, world size, local rank and the launcher's own processes.

Only infcl/parallel reads a launcher's variables. It supports deepspeed, torchrun, srun and mpirun; plain `python` runs
one rank.
"""

import os
import re

# each launcher's variables for (rank, world size, local rank); the first launcher whose rank is set is used
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # deepspeed, torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)
# torchrun, deepspeed, mpirun, srun: number of ranks on this node; "8(x2)" is Slurm's "8 on each of two nodes"
NODE_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE")


def read_environment() -> tuple[int, int, int]:
    """Return the rank, world size and local rank that the launcher set, or (0, 1, 0) without a launcher."""
    for names in VARIABLES:
        if names[0] in os.environ:
            rank, world_size, local_rank = (
                int(os.environ.get(name, default)) for name, default in zip(names, ("0", "1", "0"))
            )
            return rank, world_size, local_rank
    return 0, 1, 0


def read_ranks_per_node() -> int | None:
    """Return the number of ranks on each node, or None if the launcher does not set it or nodes differ."""
    for name in NODE_SIZES:
        if found := re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(name, "")):
            return int(found[1])
    return None


def binds_ranks() -> bool:
    """Return whether the launcher gives each rank its own cores, as mpirun and srun do. Call before `export_rank`."""
    return VARIABLES[0][0] not in os.environ


def export_rank(rank: int, world_size: int, local_rank: int) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK for DeepSpeed, unless the launcher did."""
    for name, value in zip(VARIABLES[0], (rank, world_size, local_rank)):
        os.environ.setdefault(name, str(value))


def launcher(*modules: str) -> int | None:
    """Return the process id of the parent of this process if it runs one of these modules, else None."""
    import psutil  # the library's losses import this package with torch alone

    parent = os.getppid()
    try:
        return parent if set(modules) & set(psutil.Process(parent).cmdline()) else None
    except psutil.Error:
        return None
