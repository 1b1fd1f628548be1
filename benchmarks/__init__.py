"""Benchmarks of the losses and of training: `python -m benchmarks.<name>`."""
