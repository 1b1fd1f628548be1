"""Registers, stack and shared memory of the Triton kernels, compiled for a GPU that need not be present.

The stack has the values that do not fit into 255 registers; every tile writes them to memory and reads them again. The
kernels are compiled as infcl/kernels launches them for D = 768, and for attention with 16 heads of 64.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from infcl.kernels import triton_backward, triton_forward
from infcl.models import triton_attention, triton_attention_blocks

_TYPES = {2: "bf16", 4: "fp32"}
_OPTIONS = ("num_warps", "num_stages")
_HOPPER = GPUTarget("cuda", 90, 32)


def compiled_forward(*, itemsize: int, masked: bool, edge: bool = False, kinds: int = 0) -> CompiledKernel:
    """Compile the forward tile.

    Args:
        itemsize: bytes per operand (2: BF16, 4: FP32).
        edge: the columns do not fill the last block.
    """
    constants = {"MASKED": masked, "EDGE": edge, "GROUPED": kinds}
    return _compiled(triton_forward._tile_sums_kernel, triton_forward._LAUNCH[itemsize], itemsize, constants)


def compiled_backward(
    *,
    itemsize: int,
    sigmoid: bool,
    masked: bool,
    edge: bool = False,
    single: bool = True,
    kinds: int = 0,
    positive: bool = False,
) -> CompiledKernel:
    """Compile the kernel that computes dS.

    Args:
        single: one exponential for both directions.
        kinds: kinds of ids, if `positive`.
    """
    constants: dict[str, bool | float] = {"SIGMOID": sigmoid, "MASKED": masked, "EDGE": edge, "SINGLE": single}
    constants |= {
        "SHARED": itemsize == 2,
        "GAIN": 1.0,
        "SUMMED": True,
        "GROUPED": kinds,
        "POSITIVE": positive,
        "HALVES": sigmoid or positive or kinds == 2,
    }
    return _compiled(triton_backward._d_logits_kernel, triton_backward._LAUNCH[itemsize], itemsize, constants)


def _compiled(kernel, launch: dict, itemsize: int, constants: dict) -> CompiledKernel:
    """Compile a kernel with argument types by name: block descriptors, pointers to float32, int32 sizes."""
    options = {name: launch[name] for name in _OPTIONS}
    constants = constants | {name: value for name, value in launch.items() if name not in _OPTIONS}
    constants |= {"DIM": 768, "PRECISION": "ieee"}
    m, n, k = (launch[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    blocks = {
        "rows_desc": (m, k),
        "columns_desc": (n, k),
        "d_logits_desc": (m, n // 2 if constants.get("HALVES") else n),
    }
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<{_TYPES[itemsize]}[{blocks[name][0]},{blocks[name][1]}]>"
        else:
            kind = "fp64" if name == "sums_ptr" else "i32" if name.endswith("_ids_ptr") else "fp32"
            signature[name] = f"*{kind}" if name.endswith("_ptr") else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=_HOPPER, options=options)


def compiled_attention(tokens: int, *, packed: bool = False) -> dict[str, CompiledKernel]:
    """Compile attention's "forward" and "backward" for BF16 sequences, or packed captions of up to `tokens` tokens."""
    if tokens > triton_attention.LONGEST:
        kernels = triton_attention_blocks._forward, triton_attention_blocks._backward
        constants: dict[str, int | None] = {
            **triton_attention_blocks._LAUNCH,
            "FULL": tokens // triton_attention.BLOCK,
            "H": 16,
            "D": 64,
        }
    else:
        kernels = triton_attention._forward, triton_attention._backward
        tile = next(tile for tile in triton_attention.TILES if tile >= tokens)
        constants = {"B": tile, "LEAST": 0, "SPANS": packed, "CAUSAL": packed, "D": 64}
        constants |= {"num_warps": triton_attention._WARPS[tile]} | ({} if packed else {"spans": None})
    options = {"num_warps": constants.pop("num_warps")}
    types = {"lse": "*fp32", "delta": "*fp32", "spans": "*i64", "length": "i32", "H": "i32", "scale": "fp32"}
    compiled = {}
    for name, kernel in zip(("forward", "backward"), kernels):
        signature = {
            argument: "constexpr" if argument in constants else types.get(argument, "*bf16")
            for argument in kernel.arg_names
        }
        aligned = {
            (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled[name] = triton.compile(source, target=_HOPPER, options=options)
    return compiled


def usage(kernel: CompiledKernel) -> dict[str, int]:
    """Return "registers" and "stack" (per thread, from cuobjdump) and "shared" (per block)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {said!r}")
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": kernel.metadata.shared}
