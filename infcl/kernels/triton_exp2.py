"""exp2, log2(1 + x) and 1 / x of a float32 tile. exp2 is shared between two units of a GPU's multiprocessor.

A multiprocessor computes 16 exponentials per cycle in its special function units, but 128 multiply-adds. One of every
PACK elements is computed by multiply-adds: split x = n + f with n an integer and |f| <= 1/2, evaluate a polynomial for
2**f, and add n to the exponent's bits. The special function units compute the other elements at the same time.

The polynomial of degree 4 is the minimax approximation on [-1/2, 1/2] for the relative error, which is 2.6e-6. This is
far below the rounding of half precision, and only half-precision results use it. Idea: software exponentials in
FlashAttention-4.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

PACK = tl.constexpr(4)
_COEFFICIENTS = (0.99999926144, 0.69312181470, 0.24024744835, 0.05591786060, 0.00957010173)


def _bits(value: float) -> str:
    """Return a float32 literal of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _assembly(pack: int) -> str:
    """Return PTX for `pack` elements: outputs $0.., then inputs. The first element uses the polynomial.

    Adding 1.5 * 2^23 rounds x to an integer in the lowest bits. x is clamped to at least -126: at -127, with a factor
    below 1, the exponent would underflow into the sign bit.
    """
    rounder = _bits(1.5 * 2**23)
    highest, *others = [_bits(c) for c in reversed(_COEFFICIENTS)]
    return "\n".join(
        [
            "{ .reg .f32 x, n, p; .reg .b32 i, e;",
            f"max.ftz.f32 x, ${pack}, {_bits(-126.0)};",
            f"add.ftz.f32 n, x, {rounder};",
            "mov.b32 i, n;",
            f"sub.ftz.f32 n, n, {rounder};",
            "sub.ftz.f32 x, x, n;",
            f"mov.f32 p, {highest};",
            *(f"fma.rn.ftz.f32 p, p, x, {c};" for c in others),
            "mov.b32 e, p;",
            "shl.b32 i, i, 23;",
            "add.s32 e, e, i;",
            "mov.b32 $0, e;",
            *(f"ex2.approx.ftz.f32 ${k}, ${pack + k};" for k in range(1, pack)),
            "}",
        ]
    )


_ASSEMBLY = tl.constexpr(_assembly(PACK.value))
_CONSTRAINTS = tl.constexpr(",".join(["=f"] * PACK.value + ["f"] * PACK.value))


def shared_exp2(features: Tensor) -> bool:
    """Return whether tiles of these features may use the shared exp2: half precision on an NVIDIA GPU."""
    return features.is_cuda and torch.version.cuda is not None and features.dtype.itemsize == 2


@triton.jit
def exp2(x, SHARED: tl.constexpr):
    """Compute 2**x, f32. SHARED needs x < 127, and returns about 2**-126 (by polynomial) or 0 for x below -126."""
    if SHARED:
        return tl.inline_asm_elementwise(_ASSEMBLY, _CONSTRAINTS, [x], dtype=tl.float32, is_pure=True, pack=PACK)
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, SHARED: tl.constexpr):
    """Compute 1 / x, f32. SHARED: by the special-function unit, 1 ulp for x in [2^-126, 2^126]."""
    if SHARED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def log2_1p(x):
    """Compute log2(1 + x) for x in [0, 1] by multiply-adds: a Chebyshev fit of log2(1 + x) / x, relative error 3e-7."""
    quotient = x * -0.0123706422086 + 0.0637875966576
    quotient = quotient * x - 0.1556000134982
    quotient = quotient * x + 0.2561797027955
    quotient = quotient * x - 0.3534546809631
    quotient = quotient * x + 0.4800737474797
    quotient = quotient * x - 0.7213107161571
    quotient = quotient * x + 1.4426947829150
    return x * quotient
