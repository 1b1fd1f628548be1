"""Scaling curves: a step's phases over the number of GPUs at a constant batch per GPU, for each kind of ring."""

from pathlib import Path

from infcl.plan.search import with_graphs
from infcl.plan.setting import Setting
from infcl.plan.timing import phases_of

_GROUPS = {
    "towers": ("encode", "replay", "tensor parallel", "ZeRO-3 hooks"),
    "loss": ("loss", "gather features"),
    "ring traffic": ("ring",),
    "ZeRO traffic": ("gradients", "parameters"),
    "host": ("host",),
    "optimizer": ("optimizer", "optimizer on the host", "gradients to it"),
}
_COLOURS = ("#4878a8", "#e0a030", "#c04848", "#6a9a58", "#303030", "#8a8a8a")


def sweep(setting: Setting, sizes: list[int], *, graphs: bool = False) -> list[dict]:
    """Compute a scaling curve.

    Args:
        setting: the setting; its batch per GPU is kept. With ring "auto" both rings are computed.
        sizes: numbers of GPUs.
        graphs: cache the activations of as many micro-batches as fit.

    Returns:
        A row per ring and size: GPUs, global batch, samples/s per GPU, exposed seconds of each group of phases.

    Raises:
        ValueError: a setting is invalid.
    """
    per_gpu = setting.global_batch // setting.gpus
    rows = []
    for ring in ("flat", "two-level") if setting.ring == "auto" else (setting.ring,):
        for size in sizes:
            other = setting.with_(gpus=size, global_batch=per_gpu * size, ring=ring)
            other.check()
            phases = phases_of(with_graphs(other.as_run()) if graphs else other.as_run())
            groups = {name: sum(p.exposed for p in phases if p.name in members) for name, members in _GROUPS.items()}
            total = sum(groups.values())
            rows.append({"ring": ring, "gpus": size, "global_batch": other.global_batch, "seconds": total, **groups})
            rows[-1]["samples_per_second_per_gpu"] = per_gpu / total
    return rows


def read_range(text: str) -> list[int]:
    """Parse 'gpus=8:4096' into [8, 16, ..., 4096].

    Raises:
        ValueError: the text has another form, or doubling does not reach the last number.
    """
    name, _, limits = text.partition("=")
    first, _, last = limits.partition(":")
    if name != "gpus" or not (first.isdecimal() and last.isdecimal()) or not 0 < int(first) <= int(last):
        raise ValueError(f"--sweep {text}: write gpus=FIRST:LAST, like gpus=8:4096")
    sizes = [int(first)]
    while sizes[-1] * 2 <= int(last):
        sizes.append(sizes[-1] * 2)
    if sizes[-1] != int(last):
        raise ValueError(
            f"--sweep {text}: the GPUs double, from {sizes[-1]} to {2 * sizes[-1]}, and {last} would be left out; "
            f"write gpus={sizes[0]}:{sizes[-1]} or gpus={sizes[0]}:{2 * sizes[-1]}"
        )
    return sizes


def crossover(rows: list[dict], group: str, ring: str) -> int | None:
    """Return the first number of GPUs at which `group` takes longer than the towers, or None."""
    return next((row["gpus"] for row in rows if row["ring"] == ring and row[group] > row["towers"]), None)


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Draw the rows of `sweep` as a PNG: each group's share of a step, and samples/s per GPU, over the GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rings = list(dict.fromkeys(row["ring"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(rings), figsize=(5.5 * len(rings), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, ring in zip(axes[0], rings):
        own = [row for row in rows if row["ring"] == ring]
        shares = [[row[name] / row["seconds"] for row in own] for name in _GROUPS]
        axis.stackplot([row["gpus"] for row in own], shares, labels=list(_GROUPS), colors=_COLOURS)
        axis.set(xscale="log", xlabel="GPUs", title=f"{ring} ring", ylim=(0, 1), xlim=(own[0]["gpus"], own[-1]["gpus"]))
        axis.set_xticks([row["gpus"] for row in own], [str(row["gpus"]) for row in own], rotation=45)
        axis.minorticks_off()
        speed = axis.twinx()
        speed.plot([row["gpus"] for row in own], [row["samples_per_second_per_gpu"] for row in own], "k.-")
        speed.set(ylim=(0, 1.05 * max(row["samples_per_second_per_gpu"] for row in rows)))
        speed.set_ylabel("samples/s per GPU (black)" if ring == rings[-1] else "")
    axes[0][0].set_ylabel("share of a step")
    axes[0][0].legend(loc="lower left", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
