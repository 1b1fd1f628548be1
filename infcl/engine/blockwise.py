"""Blockwise 8-bit quantization of a flat optimizer state.

Each element is a code into a table of 256 values. Each block of 256 elements shares one scale, its largest magnitude:

    value = table[code] * largest of its block

The tables are bitsandbytes' dynamic ones (Dettmers et al. 2022, arXiv 2110.02861), with -1 instead of -0.993. So the
largest element of a block is exact whatever its sign, and values that are read and written back keep their codes.
Checkpoints store the values in FP32. The layout that wrote them restores them bit for bit.
"""

import torch

BLOCK = 256


class Blockwise:
    """[n] quantized values, initially zero.

    Attributes:
        table: [256] f32, ascending.
        codes: [n] uint8, indices into `table`.
        largest: [ceil(n / 256)] f32, largest magnitude of each block.
    """

    def __init__(self, count: int, table: torch.Tensor, device: torch.device):
        self.table = table.to(device)
        zero = int((self.table == 0).nonzero()[0])
        self.codes = torch.full((count,), zero, dtype=torch.uint8, device=device)
        self.largest = torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=device)
        self._written: torch.Tensor | None = None  # [n] f32, between `write` and `settle`

    def read(self, offset: int, count: int) -> torch.Tensor:
        """Return the values [offset, offset + count), f32."""
        if self._written is not None:
            return self._written.narrow(0, offset, count)
        blocks = torch.arange(offset, offset + count, device=self.codes.device).div_(BLOCK, rounding_mode="floor")
        return self.table[self.codes.narrow(0, offset, count).long()] * self.largest[blocks]

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Set values from `offset` on. `settle` quantizes them later, since a block may be written in parts."""
        if self._written is None:
            self._written = self.read(0, len(self.codes)).clone()
        self._written.narrow(0, offset, len(values)).copy_(values)

    def settle(self) -> None:
        """Quantize the values that were written since the last call."""
        if self._written is None:
            return
        count = len(self.codes)
        padded = torch.nn.functional.pad(self._written, (0, -count % BLOCK)).view(-1, BLOCK)
        self.largest.copy_(padded.abs().amax(dim=1))
        shares = (padded / self.largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:count]
        middles = (self.table[1:] + self.table[:-1]) / 2
        self.codes.copy_(torch.bucketize(shares, middles))
        self._written = None


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables for signed and for non-negative values, [256] f32 each. Requires bitsandbytes."""
    from bitsandbytes.functional import create_dynamic_map

    signed, unsigned = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
    signed[0] = -1.0
    return signed, unsigned
