"""What a run needs and how fast it goes, before it runs.

    profile.py   what GPUs and links can do (profiles/*.json)     setting.py   model, GPUs, batch, ZeRO that are planned
    loads.py     what memory follows from: a run, a setting       timing.py    seconds of a step, phase by phase
    memory.py    bytes per GPU, part by part (parts, activations; host.py: in host memory)
    search.py    the largest batch, the fastest setting           sweep.py     scaling curves
    measure.py   the profile of this machine's GPU

`python -m infcl.plan --help`; docs/benchmarks/planner.md has what it was checked against.
"""
