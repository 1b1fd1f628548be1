"""Losses of many ranks on several hosts, and of one rank with the same batch: `python -m benchmarks.ranks` (root).

Hosts are network namespaces (tests/lib/hosts.py) of SLOTS ranks, started through ssh as the README says; each trains on
a CPU, over gloo. The run is that of tests/cluster/test_cluster.py with a two-level ring: what is learned is
whether ranks and hosts change a loss, not how fast they are. Four hosts of eight ranks take 11 GB of memory.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.clock import hardware
from benchmarks.rows import append
from infcl.config import counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8, help="ranks of each host")
    parser.add_argument("--pairs", type=int, default=64, help="of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    from infcl.data.demo import prepare_demo
    from tests.lib.cluster_run import losses_of_hosts_and_of_one_rank
    from tests.lib.hosts import missing

    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        demo = prepare_demo(Path(folder) / "demo", num_train=1536)
        found = losses_of_hosts_and_of_one_rank(
            demo, Path(folder), hosts=options.hosts, slots=options.slots, pairs=options.pairs, steps=options.steps
        )
    rows = [
        {"hosts": hosts, "ranks": ranks, "pairs": options.pairs, "step": step, "loss": loss} | hardware(None)
        for (hosts, ranks), losses in zip(((options.hosts, options.hosts * options.slots), (1, 1)), found, strict=True)
        for step, loss in enumerate(losses, 1)
    ]
    for row in rows:
        print(f"{counted(row['hosts'], 'host')}, {counted(row['ranks'], 'rank')}, step {row['step']}: {row['loss']}")
    append(options.csv, rows)


if __name__ == "__main__":
    main()
