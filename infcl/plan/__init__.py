"""Estimates of a run's memory and step time before it starts.

    profile.py      rates of GPUs and links (profiles/*.json)     setting.py   planned model, GPUs, batch, ZeRO stage
    loads.py        inputs of the memory estimate                 timing.py    seconds of a step, phase by phase
    activations.py  bytes of the towers' graphs                   memory.py    bytes per GPU and host, part by part
    search.py       largest batch, fastest settings, curves       measure.py   the profile of this machine's GPU

`python -m infcl.plan --help` lists the options; docs/benchmarks/planner.md compares estimates with measurements.
"""
