"""Tensor- and data-parallel process groups from megatron-core, and the interface to them that DeepSpeed expects.

Neighbouring ranks form a tensor-parallel group: rank = dp_rank * T + tp_rank.
"""

import dataclasses
import logging

import torch.distributed as dist
from megatron.core import parallel_state

from infcl.loss.links import timeout_of
from infcl.parallel import Parallel
from megatron_patches.patches import apply_patches

_log = logging.getLogger(__name__)
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # NCCL group -> gloo group of the same ranks


def init_tensor_parallel(parallel: Parallel, size: int, *, on_host: bool = False) -> Parallel:
    """Put the ranks into tensor-parallel groups of `size`. Collective; idempotent for the same size.

    Args:
        parallel: the ranks of the run.
        size: tensor-parallel ranks T.
        on_host: also make `tp_host_group` on GPUs: a gloo group in addition to NCCL's.

    Returns:
        `parallel` with its tensor- and data-parallel groups.

    Raises:
        ValueError: `size` does not divide the world size, or megatron-core is initialised with another layout.
        RuntimeError: a patched function of megatron-core takes other arguments than in the tested version.
    """
    ranks = parallel.world_size
    if ranks % size:
        others = " or ".join(str(smaller) for smaller in range(1, ranks + 1) if ranks % smaller == 0)
        raise ValueError(
            f"--tensor-parallel-size {size} does not divide the number of ranks, {ranks}: start a multiple of {size} "
            f"(deepspeed --num_gpus {size} pretrain_clip.py ...), or use --tensor-parallel-size {others}"
        )
    shared = [node for node in parallel.nodes if node.num_ranks % size]
    if shared and parallel.rank == 0:
        _log.warning(
            "--tensor-parallel-size %d shares layers between hosts, since it does not divide the ranks of %s: what "
            "each layer sends goes over the network",
            size,
            shared[0],
        )
    assert dist.group.WORLD is not None
    timeout = timeout_of(dist.group.WORLD)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=size,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )
    check_layout(size)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    apply_patches(parallel.device)
    host_group = tp_group if dist.get_backend(tp_group) == "gloo" else _host_groups.get(tp_group)
    if on_host and host_group is None:
        host_group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
        _host_groups[tp_group] = host_group
    dp_group = parallel_state.get_data_parallel_group()
    return dataclasses.replace(parallel, dp_group=dp_group, tp_group=tp_group, tp_host_group=host_group)


def check_layout(size: int | None = None) -> None:
    """Check that megatron-core's layout, if it exists yet, is tensor- and data-parallel only.

    Args:
        size: the tensor-parallel size to expect; None: any.

    Raises:
        ValueError: the layout has pipeline or context parallelism, or another tensor-parallel size.
    """
    if not parallel_state.is_initialized():
        return
    others = {
        "pipeline-model-parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "context-parallel": parallel_state.get_context_parallel_world_size(),
    }
    for name, found in others.items():
        if found > 1:
            raise ValueError(
                f"{name} size {found}: towers are split over tensor-parallel ranks only, and the loss needs full "
                f"features on every rank; use 1 (Megatron-LM: --{name}-size 1)"
            )
    found = parallel_state.get_tensor_model_parallel_world_size()
    if size is not None and found != size:
        raise ValueError(f"megatron-core is initialised with tensor-parallel size {found}, not {size}")


class DeepSpeedMpu:
    """megatron-core's groups under the names that DeepSpeed 0.19.8 calls. megatron-core has renamed half of them.

    DeepSpeed averages and shards over the data-parallel group, and sums gradient norms over the model-parallel group.
    The norm includes every rank's parameters that are marked tensor_model_parallel; of the other parameters, only those
    of tensor-parallel rank 0.
    """

    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
