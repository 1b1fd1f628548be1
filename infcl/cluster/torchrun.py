"""torchrun, ending with the code of the rank that failed first: python -m infcl.cluster.torchrun TORCHRUN'S ARGUMENTS

It starts a rank on each visible GPU, or one on a CPU, unless --nproc-per-node says how many. torchrun itself exits with
1 whatever its ranks exited with, but what restarts a run has to tell a usage error (2) and a diverged run (65) from a
failure: launch/torchrun.sh comes here. The ranks that torchrun ends after the first do not count. A rank that a signal
ended counts as in a shell, 128 + its number, and so does torchrun.

SIGUSR1, by which a scheduler announces the end of a run's time, is passed to the ranks too: by default it would end
torchrun and leave them behind. Ranks that were sent a signal have five minutes for their step and a checkpoint, not
half a minute (where torch knows TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
"""

import os
import sys

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # torchrun's own flag
    os.environ.setdefault("PET_NPROC_PER_NODE", str(torch.cuda.device_count() or 1))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    try:
        torchrun(argv)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr, flush=True)
        code = failed.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as told:
        return 128 + told.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
