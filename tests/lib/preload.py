"""What the ranks of ranks.py import, imported once: they are forked from a process that does nothing else."""

import contextlib
import gc
import importlib
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process that is forked has one thread: numpy would start others
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks when it is imported, and would touch a GPU

for _name in (
    "deepspeed",
    "deepspeed.runtime.zero.utils",  # torch's compiler, which it takes when an engine is made
    "infcl.train.trainer",
    "matplotlib.pyplot",
    "megatron.core.tensor_parallel",
    "pytest",
):
    with contextlib.suppress(ImportError):  # the tests that need it say so
        importlib.import_module(_name)

gc.freeze()  # what is imported stays: no collection in a rank walks through it, or copies its pages by doing so
