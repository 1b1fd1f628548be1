"""Precision of a run: what --precision means to the towers, the engine, the loss and the planner."""

from dataclasses import dataclass

import torch

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Precision:
    """A precision; str() gives its name.

    Attributes:
        half_parameters: parameters have the matmuls' dtype, and the engine keeps FP32 master weights.
        matmul_dtype: of the towers' matmuls.
        autocast: parameters are FP32 and are converted for each matmul.
    """

    half_parameters: bool
    matmul_dtype: torch.dtype
    autocast: bool

    def __str__(self) -> str:
        return "amp_" * self.autocast + self.short_name

    @property
    def short_name(self) -> str:
        """Name of the matmuls' dtype: fp32, bf16 or fp16."""
        return _NAMES[self.matmul_dtype]

    @property
    def half_matmuls(self) -> bool:
        return self.matmul_dtype != torch.float32

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.matmul_dtype if self.half_parameters else torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may underflow, so that a loss scale is needed."""
        return self.matmul_dtype == torch.float16


PRECISIONS = {
    str(precision): precision
    for precision in (
        Precision(half_parameters=False, matmul_dtype=torch.float32, autocast=False),
        Precision(half_parameters=False, matmul_dtype=torch.bfloat16, autocast=True),
        Precision(half_parameters=True, matmul_dtype=torch.bfloat16, autocast=False),
        Precision(half_parameters=True, matmul_dtype=torch.float16, autocast=False),
    )
}
