"""Estimates of a run's memory and step time before it starts.

    profile.py  rates of GPUs and links (profiles/*.json)      setting.py  model, batch, ZeRO stage and machine
    memory.py   bytes per GPU and host, part by part           timing.py   seconds of a step, phase by phase
    fit.py      what fits, the largest batch                   measure.py  the profile of this machine's GPU

`python -m infcl.plan --help` lists the options; docs/benchmarks/planner.md compares estimates with measurements.
"""
