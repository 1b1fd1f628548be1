"""Measurement of this machine's first GPU, for `python -m infcl.plan --measure FILE`.

Measured: an 8192^3 BF16 matmul; transformer blocks of ViT-L-14's width, eager and compiled, forward and backward; the
tiled loss; copies on the device and from pinned host memory; a Python loop; a copy between two GPUs of this node
(NVLink or PCIe). Estimated: the share of memory for tensors, the effect of the loop's time on a step and, with a single
GPU, the link. Links to other nodes have their own profiles (--link); nccl-tests measures them.
"""

import statistics
import time

import torch

from infcl.loss.inf_cl import inf_cl_loss
from infcl.models.transformer import Transformer
from infcl.plan.profile import Gpu

_WIDTH, _HEADS, _LAYERS, _TOKENS, _BATCH = 1024, 16, 4, 257, 128
_ROWS, _DIM = 32768, 768
# Assumed seconds of the loop on a host of host_factor 1, calibrated on one machine: there the loop took 1.41 s, and a
# factor of 2.9 fits the four steps of docs/benchmarks/step.md best.
_LOOP_SECONDS = 0.486
_LOOP = "total = 0\nfor i in range(10_000_000): total += i"  # in a module's namespace, as in the calibration


def measure() -> Gpu:
    """Measure the profile of this machine.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU: use a profile of infcl/plan/profiles instead")
    device, alone = torch.device("cuda", 0), torch.cuda.device_count() == 1
    properties, matmul = torch.cuda.get_device_properties(device), _matmul(device, torch.bfloat16)
    return Gpu(
        name=torch.cuda.get_device_name(device),
        memory_gib=round(properties.total_memory / 2**30, 1),
        matmul_tflops=round(matmul / 1e12),
        tower_efficiency=round(_towers(device, compiled=False) / matmul, 3),
        compiled_efficiency=round(_towers(device, compiled=True) / matmul, 3),
        loss_efficiency=round(_loss(device) / matmul, 3),
        hbm_gbs=round(copy_rate(device, device) * 2),
        link_gbs=25 if alone else round(copy_rate(device, torch.device("cuda", 1))),
        pcie_gbs=round(copy_rate(torch.device("cpu"), device)),
        source="measured by python -m infcl.plan --measure; estimated: host_factor" + ", link_gbs" * alone,
        fp32_tflops=round(_matmul(device, torch.float32) / 1e12),
        host_factor=round(host_factor(), 2),
    )


def host_factor() -> float:
    """Return the time of a Python loop relative to a host of factor 1, since Python code issues the GPU's work.

    The shortest of five runs counts, because other work on the machine only adds time.
    """
    turns = []
    for _ in range(5):
        started = time.perf_counter()
        exec(_LOOP, {})
        turns.append(time.perf_counter() - started)
    return min(turns) / _LOOP_SECONDS


def _seconds(function, *, warm_up: int = 5, repeats: int = 10) -> float:
    times = []
    for index in range(warm_up + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if index >= warm_up:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return flops per second of an 8192^3 matmul; float32 without TF32, the default of torch and the trainer."""
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    return 2 * 8192**3 / _seconds(lambda: a @ a, warm_up=50)


def _towers(device: torch.device, *, compiled: bool) -> float:
    """Return flops per second of the forward and backward of some blocks under BF16 autocast."""
    blocks = Transformer(_WIDTH, _LAYERS, _HEADS, mlp_ratio=4.0).to(device)
    if compiled:
        blocks = torch.compile(blocks)
    values = torch.randn(_BATCH, _TOKENS, _WIDTH, device=device, requires_grad=True)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            blocks(values).sum().backward()

    block = 2 * _TOKENS * 12 * _WIDTH**2 + 4 * _TOKENS**2 * _WIDTH
    return 3 * _LAYERS * _BATCH * block / _seconds(step)


def _loss(device: torch.device) -> float:
    features = torch.nn.functional.normalize(torch.randn(2, _ROWS, _DIM, device=device), dim=-1).bfloat16()
    images, texts = (side.clone().requires_grad_() for side in features)
    return 8 * _ROWS**2 * _DIM / _seconds(lambda: inf_cl_loss(images, texts, 50.0).backward())


def copy_rate(source: torch.device, target: torch.device) -> float:
    """Return the GB/s of a 1 GiB copy, where each byte counts once."""
    block = torch.empty(2**30, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    other = torch.empty(2**30, dtype=torch.uint8, device=target)
    return 2**30 / 1e9 / _seconds(lambda: other.copy_(block, non_blocking=True))
