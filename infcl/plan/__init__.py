"""Estimates of a run's memory and step time before it starts.

    profile.py   rates of GPUs and links (profiles/*.json)        setting.py   planned model, GPUs, batch, ZeRO stage
    loads.py     inputs of the memory estimate                    timing.py    seconds of a step, phase by phase
    memory.py    bytes per GPU, part by part (parts, activations; host.py: in host memory)
    search.py    the largest batch, the fastest setting           sweep.py     scaling curves
    measure.py   the profile of this machine's GPU

`python -m infcl.plan --help` lists the options; docs/benchmarks/planner.md compares estimates with measurements.
"""
