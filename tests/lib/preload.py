"""The imports of the ranks of ranks.py, done once in the process from which they are forked."""

import contextlib
import gc
import importlib
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy must not start threads before the fork
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import, and would use a GPU

for _name in (
    "deepspeed",
    "deepspeed.runtime.zero.utils",  # imports torch's compiler, which an engine needs
    "infcl.train.trainer",
    "matplotlib.pyplot",
    "megatron.core.tensor_parallel",
    "pytest",
):
    with contextlib.suppress(ImportError):  # tests that need it report that
        importlib.import_module(_name)

gc.freeze()  # the collector of a rank skips these objects, so that their pages are not copied
