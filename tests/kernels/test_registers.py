"""The Triton kernels compile for a Hopper GPU, also where none is: what Triton's interpreter does not check.

They are compiled as infcl launches them, for BF16 operands with D = 768 and for attention with 16 heads of 64. A kernel
spills values that do not fit into 255 registers to the stack; every tile writes them to memory and reads them again.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from infcl.kernels import triton_backward, triton_forward  # noqa: E402
from infcl.models import triton_attention, triton_attention_blocks  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 232448  # bytes of shared memory of a Hopper multiprocessor
SHARED_ANYWHERE = 101376  # the least of the GPUs since 2020


def usage(kernel) -> dict[str, int]:
    """Return "registers" and "stack" per thread, from cuobjdump, and "shared" per block, in bytes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": kernel.metadata.shared}


def tile_usage(kernel, launch: dict, **constants) -> dict[str, int]:
    """Compile a tile with argument types by name: block descriptors, pointers to float32, int32 sizes."""
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    constants |= {name: value for name, value in launch.items() if name not in options}
    constants = {"POSITIVE": False, "LIMITED": False} | constants | {"DIM": 768, "PRECISION": "ieee"}
    m, n, k = (launch[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    width = n // 2 if constants.get("HALVES") else n
    blocks = {"rows_desc": (m, k), "columns_desc": (n, k), "d_logits_desc": (m, width)}
    types = {"d_logits_desc": constants.pop("out", "bf16"), "wanted_desc": "fp32"}
    if constants.get("TEACHER"):
        blocks["wanted_desc"], options["num_stages"] = (m, width), 2
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<{types.get(name, 'bf16')}[{blocks[name][0]},{blocks[name][1]}]>"
        else:
            kind = "fp64" if name == "sums_ptr" else "i32" if name.endswith("_ids_ptr") else "fp32"
            signature[name] = f"*{kind}" if name.endswith(("_ptr", "_desc")) else "i32"
    return usage(triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options))


@pytest.mark.parametrize(
    ("options", "stack"),
    [
        ({"MASKED": True}, 0),
        ({"MASKED": True, "EDGE": True}, 0),  # the columns do not fill the last block
        ({"GROUPED": True}, 0),
        ({"LIMITED": True}, 0),
        ({"LIMITED": True, "MASKED": True}, 320),  # most of it in the loop over the few tiles on the diagonal
    ],
    ids=str,
)
def test_the_forward_tile_fits_into_registers(options, stack):
    constants = {"MASKED": False, "EDGE": False, "GROUPED": False} | options
    launch = triton_forward._LAUNCH[2] | (triton_forward._LIMITED_LAUNCH if "LIMITED" in options else {})
    used = tile_usage(triton_forward._tile_sums_kernel, launch, **constants)
    assert 32 < used["registers"] <= 255 and used["stack"] <= stack and 0 < used["shared"] <= SHARED, used


@pytest.mark.parametrize(
    ("options", "stack"),
    [
        ({}, 0),
        ({"MASKED": True}, 128),  # a block pair on the diagonal, one of W
        ({"MASKED": True, "EDGE": True}, None),
        ({"MASKED": True, "EDGE": True, "SINGLE": False}, None),  # not one exponential for both directions
        ({"GROUPED": True, "POSITIVE": True}, 128),
        ({"LIMITED": True}, 0),
        ({"LIMITED": True, "MASKED": True}, 256),
        ({"LIMITED": True, "GROUPED": True}, 0),
        ({"LIMITED": True, "GROUPED": True, "POSITIVE": True}, 128),
        ({"TEACHER": True}, 256),
        ({"out": "fp32"}, 0),  # a teacher's probabilities
        ({"SIGMOID": True}, 128),
        ({"SIGMOID": True, "GROUPED": True, "POSITIVE": True}, 128),
    ],
    ids=str,
)
def test_the_backward_tile_compiles_and_spills_little(options, stack):
    plain = {"SIGMOID": False, "MASKED": False, "EDGE": False, "SINGLE": True, "GROUPED": False, "TEACHER": False}
    constants = plain | {"SHARED": True, "GAIN": 1.0} | options
    constants["HALVES"] = bool(
        constants["SIGMOID"]
        or constants.get("POSITIVE")
        or options.keys() & {"TEACHER", "out"}
        or options.keys() >= {"LIMITED", "GROUPED"}
    )
    used = tile_usage(triton_backward._d_logits_kernel, triton_backward._LAUNCH[2], **constants)
    assert 0 < used["shared"] <= SHARED and (stack is None or used["stack"] <= stack), used


@pytest.mark.parametrize(
    ("tokens", "packed", "stack"),
    [(50, False, 0), (77, False, 384), (257, False, 0), (77, True, 128)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((129, False, 0), (197, False, 0), (20, True, 0))],
)
def test_attention_fits_into_registers_except_the_backward_of_128_tokens(tokens, packed, stack):
    """For sequences of so many tokens, or packed captions of up to so many. stack: of the backward, at most."""
    if tokens > triton_attention.LONGEST:
        kernels = triton_attention_blocks._forward, triton_attention_blocks._backward
        constants = {"FULL": tokens // triton_attention.BLOCK, "H": 16, "D": 64}
        constants["num_warps"] = triton_attention_blocks._WARPS
    else:
        kernels = triton_attention._forward, triton_attention._backward
        tile = next(tile for tile in triton_attention.TILES if tile >= tokens)
        constants = {"B": tile, "LEAST": 0, "SPANS": packed, "CAUSAL": packed, "D": 64}
        constants |= {"num_warps": triton_attention._WARPS[tile]} | ({} if packed else {"spans": None})
    options = {"num_warps": constants.pop("num_warps")}
    types = {"lse": "*fp32", "delta": "*fp32", "spans": "*i64", "length": "i32", "H": "i32", "scale": "fp32"}
    for kernel, most in zip(kernels, (0, stack)):
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
        pointers = [place for place, kind in enumerate(signature.values()) if kind.startswith("*")]
        aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
        compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=HOPPER, options=options)
        used = usage(compiled)
        assert used["stack"] <= most and 0 < used["shared"] <= SHARED_ANYWHERE, used
