"""Steps on GPUs in which the host never waits for the GPU."""

from unittest import mock

import torch

from tests.lib.step_oracle import EPS, LR, ToyCLIP, global_batch


def steps_without_waiting(preset, *, last_backward: bool = True) -> None:
    """Run six steps; from the fifth on, it is an error if the host waits for the GPU.

    torch's sync debug mode does not detect torch.cuda.synchronize, so it is patched.

    Args:
        last_backward: also forbid waits in the last backward, after which there is nothing left to launch.
    """
    from infcl.config import BatchPlan, TrainConfig
    from infcl.engine.engine import Engine
    from infcl.parallel import init_parallel
    from infcl.train.build import build_loss
    from tests.lib.engine_steps import accumulate
    from tests.lib.specs import spec_of

    config = TrainConfig(deepspeed_config=str(preset), lr=LR, eps=EPS, dataset_type="synthetic", train_num_samples=1)
    parallel = init_parallel("cuda")
    spec = spec_of(config, parallel, BatchPlan(parallel.world_size, 3, 5))
    engine, loss = Engine(ToyCLIP(), spec, parallel), build_loss(spec, parallel)
    micro_batches = list(zip(*(side.cuda().split(5) for side in global_batch(15, seed=1 + parallel.rank))))

    def allow_waits(allowed):
        torch.cuda.set_sync_debug_mode("default" if allowed else "error")
        torch.cuda.synchronize = synchronize if allowed else mock.Mock(side_effect=AssertionError("waits for the GPU"))

    def backward(surrogate, is_last):
        if is_last and not last_backward:
            allow_waits(True)
        plain_backward(surrogate, is_last)

    plain_backward, engine.backward = engine.backward, backward
    synchronize = torch.cuda.synchronize
    try:
        for step in range(6):  # the first steps compile kernels and, on one GPU, record the loss as a CUDA graph
            allow_waits(step < 4)
            accumulate(engine, micro_batches, [0] * 3, loss=loss)
            allow_waits(True)
            engine.step(LR)
    finally:
        allow_waits(True)
