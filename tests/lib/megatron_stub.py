"""A stub of Megatron-LM's training package."""

import sys
import types


def get_forward_backward_func(pp_size=None, vp_size=None):
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    return forward_backward_no_pipelining


def stub_training_package():
    training = types.ModuleType("megatron.training.training")
    training.get_forward_backward_func = get_forward_backward_func
    package = types.ModuleType("megatron.training")
    package.args = types.SimpleNamespace(seed=1234, curr_iteration=0)
    package.get_args = lambda: package.args
    sys.modules["megatron.training"] = package
    sys.modules["megatron.training.training"] = training
    return training
