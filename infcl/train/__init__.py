"""The training loop and what builds it.

Reading order: build -> trainer -> observers and the observers (stragglers, profiler, metrics, finite, saves) -> results
-> ending (exit codes).
"""
