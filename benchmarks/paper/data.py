"""How fast one core reads, from what benchmarks.data measured."""

from benchmarks.paper.raw import markdown, rows

STAGES = {
    "plan of an epoch": "plan an epoch, chunks of 16",
    "index (headers)": "index",
    "read": "read",
    "decode": "decode",
    "augment": "augment",
    "tokenise": "tokenise",
    "a whole batch": "batch",
    "a whole batch, `scale='(0.08,1)'`": "batch, scale (0.08, 1)",
    "a whole batch, colour jitter and grey": "batch, color jitter",
}


def speed() -> str:
    """Samples/s of one core, stage by stage, and open_clip's worker path in the same rounds."""
    found = rows("data.csv")
    rates = {row["stage"]: row["samples_per_second_per_core"] for row in found}
    lines = []
    for name, stage in STAGES.items():
        ours, theirs = rates[f"ours/{stage}"], rates.get(f"open_clip/{stage}")
        lines.append([name, _rate(ours), *([_rate(theirs), f"{ours / theirs:.1f}x"] if theirs else ["", ""])])
    last = found[-1]
    where = f"{last['cpu']}, torch {last['torch']}, load {last['load']}, commit {last['commit']}; {last['images']}."
    return markdown(["", "infcl", "open_clip 3.3", ""], lines) + f"\n\n{where}"


def _rate(value: float) -> str:
    """To four digits."""
    return f"{float(f'{value:.4g}'):,.0f}"
