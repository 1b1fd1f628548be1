"""One column-parallel layer, forward and backward, three ways: `python -m benchmarks.tensor_parallel_layers --gpus 2`.

    ours       megatron_patches.linear: sums the input's gradient over the ranks while it computes the weight's
    mapping    megatron-core's copy_to_tensor_model_parallel_region before torch's product: sums it afterwards
    megatron   megatron-core's linear_with_grad_accumulation_and_async_allreduce, on bfloat16 copies of x, W and b
    alone      torch's product of the same part, without any other rank

The layer is c_fc of three image towers, m = --batch-size samples of 257 tokens, bf16 autocast over fp32 weights.
Median of --repeats, in milliseconds; the slowest rank counts.
"""

import argparse
import statistics
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.clock import require_gpus, timed
from benchmarks.spawn import on_ranks

LAYERS = {"ViT-L-14": (1024, 4096), "ViT-bigG-14": (1664, 8192), "5B": (3072, 12288)}  # width, MLP features
TOKENS = 257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    require_gpus("benchmarks.tensor_parallel_layers", arguments.gpus)
    on_ranks(_rank, arguments.gpus, arguments)


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    from infcl.parallel import destroy_parallel, init_parallel
    from megatron_patches.groups import init_tensor_parallel

    parallel = init_tensor_parallel(init_parallel("cuda"), arguments.gpus)
    assert parallel.tp_group is not None
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, T = {arguments.gpus}, m = {arguments.batch_size}", flush=True)
        print(f"{'layer':>12}" + "".join(f"{way:>10}" for way in ("ours", "mapping", "megatron", "alone")), flush=True)
    for name, (width, hidden) in LAYERS.items():
        times = _times(width, hidden // arguments.gpus, arguments, parallel.tp_group)
        if rank == 0:
            print(f"{name:>12}" + "".join(f"{time:>10.3f}" for time in times), flush=True)
    destroy_parallel()


def _times(width: int, features: int, arguments: argparse.Namespace, group: dist.ProcessGroup) -> list[float]:
    weight = torch.randn(features, width, device="cuda").requires_grad_()
    bias = torch.zeros(features, device="cuda").requires_grad_()
    x = torch.randn(arguments.batch_size, TOKENS, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    d_y = torch.randn(*x.shape[:2], features, device="cuda", dtype=torch.bfloat16)

    def step(way) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = way(x, weight, bias)
        torch.autograd.backward(y, d_y)
        x.grad = weight.grad = bias.grad = None

    return [statistics.median(timed(partial(step, way), arguments.repeats, group, warm_up=5)) for way in _ways(group)]


def _ways(group: dist.ProcessGroup) -> list:
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from megatron_patches.linear import Sharing, columns

    sharing = Sharing(group, sequence_parallel=False)

    def megatron(x, weight, bias):
        weight, bias = weight.bfloat16(), bias.bfloat16()
        with torch.autocast("cuda", enabled=False):
            return linear_with_grad_accumulation_and_async_allreduce(
                x, weight, bias, gradient_accumulation_fusion=False, allreduce_dgrad=True, sequence_parallel=False,
                tp_group=group,
            )  # fmt: skip

    return [
        lambda x, weight, bias: columns(x, weight, bias, sharing),
        lambda x, weight, bias: F.linear(copy_to_tensor_model_parallel_region(x, group=group), weight, bias),
        megatron,
        F.linear,
    ]


if __name__ == "__main__":
    main()
