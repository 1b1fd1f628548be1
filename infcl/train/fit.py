"""Check that a run's flags fit into the memory of its ranks, and choose the micro-batch size of --batch-size auto."""

import dataclasses

import torch
import torch.distributed as dist

from infcl.parallel import Parallel, max_over, ranks_of_host
from infcl.parallel.host_limits import host_memory_bytes
from infcl.plan.fit import Fit
from infcl.plan.setting import parameter_counts
from infcl.train.build import Inputs, build_meta_model


def fit_to_memory(inputs: Inputs, parallel: Parallel) -> Inputs:
    """Check the memory of a run and choose the micro-batch size where it is auto. Collective.

    Args:
        inputs: a `batch_size` of 0 in the flags means auto.
        parallel: the ranks. All use the smallest memory among them.

    Returns:
        `inputs` with a micro-batch size.

    Raises:
        ValueError: on every rank, with the numbers and a suggestion, when the run cannot fit.
    """
    spec, cfg = inputs.spec, inputs.model_config.planned
    if spec.flags.skip_memory_check and spec.flags.batch_size:
        return inputs
    if cfg is None:
        if spec.flags.batch_size == 0:
            raise ValueError(
                f"--batch-size auto: the memory of {spec.flags.model} cannot be planned; give a number of samples"
            )
        return inputs
    counts = parameter_counts(build_meta_model(spec.flags, cfg))
    own = [-memory_of_device(parallel), -host_memory_bytes()]
    capacity, host = (-most for most in max_over(dist.group.WORLD, own, parallel.device))  # minimum over ranks
    fit = Fit(spec, cfg, counts, capacity, host, ranks_of_host(parallel), inputs.teacher_size)
    if spec.flags.batch_size == 0:
        return dataclasses.replace(inputs, spec=fit.choose())
    fit.check()
    return inputs


def memory_of_device(parallel: Parallel) -> float:
    """Return the bytes that a rank may use: the GPU's memory, or on a CPU its share of the host's or cgroup's."""
    if parallel.device.type == "cuda":
        return float(torch.cuda.get_device_properties(parallel.device).total_memory)
    return host_memory_bytes() / ranks_of_host(parallel)
