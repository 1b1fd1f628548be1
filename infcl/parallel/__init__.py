"""Ranks, process groups, rendezvous and heartbeat: the only package that reads the launcher's environment."""

from infcl.parallel.collectives import (
    all_gather,
    from_first_rank,
    gather_objects,
    join_parts,
    max_over,
    mean_over,
    reduce_scatter,
    require_equal,
)
from infcl.parallel.environment import read_environment, read_ranks_per_node
from infcl.parallel.groups import (
    Parallel,
    describe_ranks,
    destroy_parallel,
    init_parallel,
    rank_and_host,
    ranks_of_host,
    why_no_gpu,
)
from infcl.parallel.process import describe_failure, report_mistake
from infcl.parallel.seeds import micro_batch_seed, seed_everything

__all__ = [
    "Parallel",
    "all_gather",
    "describe_failure",
    "describe_ranks",
    "destroy_parallel",
    "from_first_rank",
    "gather_objects",
    "init_parallel",
    "join_parts",
    "max_over",
    "mean_over",
    "micro_batch_seed",
    "rank_and_host",
    "ranks_of_host",
    "read_environment",
    "read_ranks_per_node",
    "reduce_scatter",
    "report_mistake",
    "require_equal",
    "seed_everything",
    "why_no_gpu",
]
