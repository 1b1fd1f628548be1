"""Tensor parallelism from megatron-core, put onto ordinary towers from outside, under the DeepSpeed engine.

Reading order: groups.py (which rank holds what; DeepSpeed's view of it) -> split.py (whole parameter <-> a rank's part)
-> linear.py, towers.py (the layers that compute with parts) -> loss.py (the ring over all ranks) -> patches.py (what is
changed in megatron-core itself) -> megatron_lm.py (the loss in Megatron-LM's own training loop).

T tensor-parallel ranks hold one copy of the model and see the same samples; D = world size / T such copies average
their gradients. Nothing here is imported when T = 1. Tested with megatron-core 0.16.1.
"""

import importlib
import warnings

with warnings.catch_warnings():  # that Transformer Engine and Apex are not there, five times
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    importlib.import_module("megatron.core")
