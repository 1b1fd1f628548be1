"""python -m benchmarks.paper --table 3 --figure 5: prints tables, draws figures into docs/; --write: all of them.

--write (make results) makes every region of the pages below anew from the raw results under docs/results, and draws the
plots whose data has changed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.paper import accuracy, data, memory, speed, steps, tensor_parallel, towers
from benchmarks.paper.draw import digest, digest_of, draw, draw_bar
from benchmarks.paper.regions import fill

DOCS = Path(__file__).parents[2] / "docs"
PAGES = tuple(f"{name}.md" for name in "results reviewers peers scaling megatron step optimizers data".split())
REGIONS: dict[str, Callable[[], str]] = {
    "demo": accuracy.demo,
    "ranks-32": accuracy.many_ranks,
    "table-1-planned": memory.table_1_planned,
    "table-1-loss": memory.table_1_loss,
    "table-1-measured": memory.table_1_measured,
    "step-memory": memory.step_memory,
    "plan-peaks": memory.plan_peaks,
    "plan-states": memory.plan_states,
    "table-2": memory.table_2,
    "table-3": accuracy.table_3,
    "table-3-pairs": accuracy.table_3_pairs,
    "table-3-ranks": accuracy.table_3_ranks,
    "table-4": speed.table_4,
    "figure-5": accuracy.table_5,
    "gradients": accuracy.gradients,
    "loss-1-gpu": speed.loss_one_gpu,
    "loss-2-gpus": speed.loss_two_gpus,
    "loss-4-gpus": speed.loss_four_gpus,
    "loss-others": speed.loss_others,
    "loss-h100": speed.loss_h100,
    "loss-origin": speed.loss_origin,
    "figure-4-steps": speed.steps_by_loss,
    "tiling": speed.tiling,
    "ring-turns": speed.ring_turns,
    "rings": speed.rings,
    "symmetry": speed.symmetry,
    "siglip-disco": speed.side_by_side,
    "precision": speed.precision,
    "retrieval": speed.retrieval,
    "towers": towers.towers,
    "smaller-towers": towers.smaller_towers,
    "thousands": towers.thousands,
    "steps": towers.measured_steps,
    "plan-errors": towers.plan_errors,
    "steps-h100": towers.steps_h100,
    "plan-losses": towers.planned_losses,
    "plan-tensor-parallel": tensor_parallel.planned_steps,
    "tensor-parallel-rates": tensor_parallel.rates,
    "tensor-parallel-memory": tensor_parallel.sequence_parallel_memory,
    "tensor-parallel-one-batch": tensor_parallel.at_one_global_batch,
    "tensor-parallel-sizes": tensor_parallel.large_towers,
    "tensor-parallel-losses": tensor_parallel.losses,
    "tensor-parallel-updates": tensor_parallel.updates,
    "peer-steps": towers.peer_steps,
    "peer-trainers": towers.peer_trainers,
    "hard-negatives": accuracy.hard_negatives,
    "step-levers": steps.levers,
    "step-captions": steps.captions,
    "step-attention": steps.attention,
    "step-residents": steps.residents,
    "step-kernels": steps.kernels,
    "attention-layers": steps.attention_layers,
    "step-one-micro-batch": steps.one_micro_batch,
    "step-reductions": steps.reductions,
    "step-zero-3": steps.zero_3,
    "step-slow-host": steps.slow_host,
    "step-zero-3-hosts": steps.zero_3_hosts,
    "optimizers": steps.optimizers,
    "locked-tower": steps.locked_tower,
    "data-speed": data.speed,
}
TABLES = {
    "1": ("table-1-measured", "step-memory", "table-1-loss", "table-1-planned"),
    "2": ("table-2",),
    "3": ("table-3", "table-3-pairs", "table-3-ranks", "gradients"),
    "4": ("table-4",),
}
# file under docs/results: (what it shows, how; None: as one bar)
FIGURES: dict[str, tuple[Callable[[], dict], dict | None]] = {
    "figure_1.png": (memory.figure_1, {"x": ("global batch", "global batch", "GPUs"), "y": "GiB per GPU"}),
    "figure_4.png": (speed.figure_4, {"x": ("global batch",) * 2, "y": "ms, forward + backward"}),
    "figure_4_steps.png": (speed.figure_4_steps, {"x": ("global batch",) * 2, "y": "one GPU"}),
    "figure_5.png": (accuracy.figure_5, {"x": ("global batch",) * 2, "y": "accuracy", "log_y": False}),
    "loss_curves.png": (
        accuracy.loss_curves,
        {"x": ("samples seen",) * 2, "y": "loss", "log_x": False, "log_y": False, "ticks": "", "overlaid": True},
    ),
    "tiling_4.png": (speed.tiling_bar, None),
}
FILES = {"losses": "loss_curves.png", "tiling": "tiling_4.png", "4-steps": "figure_4_steps.png"}
FILES |= {name: f"figure_{name}.png" for name in "145"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", default=[], choices=tuple(TABLES))
    parser.add_argument("--figure", action="append", default=[], choices=tuple(FILES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    for table in options.table:
        print("\n\n".join(REGIONS[name]() for name in TABLES[table]), "\n")
    for figure in options.figure:
        draw_if_new(FILES[figure])
    if options.write:
        for page in PAGES:
            path = DOCS / page
            path.write_text(fill(path.read_text(), REGIONS))
        for name in FIGURES:
            draw_if_new(name)


def draw_if_new(name: str) -> None:
    """Draw docs/results/`name`, unless it shows this data already, or there is none yet."""
    panels, path = FIGURES[name][0](), DOCS / "results" / name
    if not any(panels.values()):
        print(f"{name}: no raw results yet")
    elif digest_of(path) != digest(panels):
        how = FIGURES[name][1]
        draw_bar(panels, path) if how is None else draw(panels, path, **how)
        print(f"drew {path}")


if __name__ == "__main__":
    main()
