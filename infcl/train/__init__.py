"""The training loop and the functions that build its parts.

Reading order: build -> trainer -> observers (stragglers and profiler; metrics, finite, saves) -> results
-> ending (exit codes).
"""
