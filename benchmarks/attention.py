"""The towers' attention, alone, and without padding: `python -m benchmarks.attention --csv docs/results/attention.csv`.

Milliseconds of one layer's attention, q|k|v in and its gradient out as in a tower's block, compiled: torch's kernels,
and the Triton kernels (kernels/triton_attention.py), where --attention auto takes them. "packed" are captions of 1 to
39 tokens in rows of 160, which torch's see with a mask.
The floor: bytes of q|k|v and of the result (backward: twice the first, once the second) at the rate of a copy.
host_both_ms: until the host has issued a forward and a backward, where the GPU is slower the GPU's time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.clock import hardware, require_gpus, timed
from benchmarks.rows import append
from infcl.models.attention import attend, fits
from infcl.models.config import TextConfig
from infcl.models.packing import caption_places, caption_spans, pack_captions
from infcl.models.transformer import attend as attend_by_torch
from infcl.plan.measure import copy_rate

_AHEAD = 4_000_000  # cycles, 2 ms: what the host takes to issue a forward and a backward
BACKENDS = {
    "by itself": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Case(NamedTuple):
    """Of a layer: m sequences of L tokens, h heads of width d."""

    name: str
    m: int
    tokens: int
    heads: int
    causal: bool = False
    packed: bool = False
    width: int = 64


CASES = (
    Case("ViT-B-32 images", 1024, 50, 12),
    Case("ViT-B-16 images", 512, 197, 12),
    Case("ViT-L-14 images", 128, 257, 16),
    Case("ViT-B-32 captions", 1024, 77, 8, causal=True),
    Case("ViT-B-32 captions, packed", 1024, 77, 8, causal=True, packed=True),
    Case("ViT-L-14 captions", 128, 77, 12, causal=True),
    Case("ViT-B-16 images, half of the patches", 512, 99, 12),
    Case("ViT-L-14 captions, packed", 128, 77, 12, causal=True, packed=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="for the CSV; default: git's HEAD")
    options = parser.parse_args()
    require_gpus("benchmarks.attention")
    device = torch.device("cuda")
    rate = 2e6 * copy_rate(device, device)  # bytes read and written a millisecond
    for case in CASES:
        qkv, spans, mask = inputs(case, "cuda", torch.bfloat16)
        ways = {name: by_torch(case, mask, backend) for name, backend in BACKENDS.items()}
        if case.packed or fits(case.tokens, causal=case.causal):
            ways["ours"] = partial(attend, seen=spans, causal=case.causal, longest=case.tokens)
        for name, way in ways.items():
            torch._dynamo.reset()  # it gives up on a function after eight graphs
            try:
                times = times_of(torch.compile(way, dynamic=False), qkv, rate, options.repeats)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the kernel does not take this case
                print(f"{case.name:>26} {name:>16} {str(error).splitlines()[0]}", flush=True)
                continue
            print(f"{case.name:>26} {name:>16}", *(f"{value:.3f}" for value in times.values()), flush=True)
            append(options.csv, [{"case": case.name, "way": name} | times | hardware(options.commit)])


def inputs(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q|k|v [rows, places, 3, h, d]; of packed captions spans and mask."""
    shape, spans, mask = (case.m, case.tokens), None, None
    if case.packed:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, min(40, case.tokens + 1), (case.m,), generator=generator)
        texts = torch.ones(case.m, case.tokens, dtype=torch.int64)
        texts[torch.arange(case.m), lengths - 1] = 2  # what is pooled
        rows, ends = pack_captions(texts, TextConfig(context_length=case.tokens))
        spans, mask = (places(rows, ends)[1].to(device) for places in (caption_spans, caption_places))
        shape = rows.shape
    return torch.randn(*shape, 3, case.heads, case.width, device=device, dtype=dtype).requires_grad_(), spans, mask


def by_torch(case: Case, mask: Tensor | None, backend: SDPBackend | None) -> Callable[[Tensor], Tensor]:
    def attend(qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return attend_by_torch(qkv, mask, causal=case.causal)

    return attend


def times_of(attend: Callable[[Tensor], Tensor], qkv: Tensor, bytes_per_ms: float, repeats: int) -> dict:
    """Of a forward alone, and of one with its backward: on the GPU, and until the host has issued both."""
    d_out = torch.randn_like(qkv[:, :, 0])

    def forward() -> None:
        with torch.no_grad():
            attend(qkv)

    def both() -> None:
        torch.autograd.grad(attend(qkv), qkv, d_out)

    forward_ms, both_ms = (timed(step, repeats, warm_up=5, ahead=_AHEAD) for step in (forward, both))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        both()
    issued = time.perf_counter() - started
    return {
        "forward_ms": statistics.median(forward_ms),
        "forward_std": statistics.stdev(forward_ms),
        "forward_floor_ms": qkv.nbytes * 4 / 3 / bytes_per_ms,
        "both_ms": statistics.median(both_ms),
        "both_std": statistics.stdev(both_ms),
        "both_floor_ms": qkv.nbytes * (4 + 7) / 3 / bytes_per_ms,
        "host_both_ms": 1e3 * issued / repeats,
    }


if __name__ == "__main__":
    main()
