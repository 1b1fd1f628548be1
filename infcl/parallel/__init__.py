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
from infcl.parallel.environment import read_environment
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
