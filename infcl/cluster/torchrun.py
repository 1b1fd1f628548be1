"""torchrun with the exit code of the first rank that fails: python -m infcl.cluster.torchrun TORCHRUN'S ARGUMENTS

torchrun itself always exits with 1 if a rank fails, but a script that restarts runs must distinguish a usage error (2)
and a diverged run (65) from other failures. If a signal ends a rank or torchrun, the exit code is 128 + the signal's
number, as in a shell. A scheduler's SIGUSR1 is forwarded to the ranks, which then have five minutes instead of 30 s to
write a checkpoint (if torch supports TORCH_ELASTIC_SHUTDOWN_TIMEOUT). After a usage error, which a rank has reported in
one line, torchrun reports nothing.
"""

import logging
import os
import sys

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_USAGE_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # torchrun's own flag
    os.environ.setdefault("PET_NPROC_PER_NODE", str(torch.cuda.device_count() or 1))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    logging.disable(logging.ERROR)  # what failed is printed below
    try:
        torchrun(argv)
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        if code != _USAGE_ERROR:
            print(failed, file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    except SignalException as received:
        return 128 + received.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
