"""Tensor parallelism from megatron-core, applied to ordinary towers from outside, under the DeepSpeed engine.

Reading order: groups.py (process groups, and DeepSpeed's view of them) -> split.py (full parameter <-> a rank's shard)
-> linear.py, towers.py (the layers that compute with shards) -> loss.py (the ring over all ranks) -> patches.py
(changes of megatron-core itself) -> megatron_lm.py (the loss in Megatron-LM's own training loop).

T tensor-parallel ranks hold one copy of the model and see the same samples; D = world size / T such copies average
their gradients. Nothing here is imported when T = 1. Tested with megatron-core 0.16.1.
"""

import importlib
import warnings

with warnings.catch_warnings():  # five warnings that Transformer Engine and Apex are missing
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    importlib.import_module("megatron.core")
