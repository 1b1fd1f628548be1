"""What a run needs and how fast it goes, before it runs.

    setting.py    what is planned: model, GPUs, batch, ZeRO ...      profiles/*.json  what GPUs and links can do
    loads.py      what memory follows from: flags, a setting        timing.py        seconds of a step, phase by phase
    memory.py     bytes per GPU, part by part (parts, activations)
    search.py     the largest batch, the fastest setting            sweep.py         scaling curves

`python -m infcl.plan --help`; docs/benchmarks/planner.md has what it was checked against.
"""
