"""torch.compile for what comes before the image tower's blocks, of which eager torch makes two dozen kernels.

    pixels to rows of patches    vision.patch_rows       casts, three channels' norms, cutting: one; a second fills rows
    class token and positions    vision.add_positions    one
    the first norm               ln_pre                  one

For the batch sizes of training; others run eagerly. Modules and parameters stay where an engine finds them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from infcl.models.config import VisionConfig
from infcl.models.transformer import LayerNorm
from infcl.models.vision import PatchConv, VisionTransformer, add_positions, patch_rows

Trial = tuple[Callable, Callable, tuple[Any, ...]]  # compiled, eager, what both are given


class CompiledEmbedding:
    """Nothing is compiled before it runs: `trials` are to be compared with eager ones, then `install` takes it in."""

    def __init__(self, batch_sizes: frozenset[int]):
        self.sizes = batch_sizes
        self.patch_rows, self.add_positions = self._compiled(patch_rows), self._compiled(add_positions)
        self.norm = self._compiled(_norm)

    def trials(
        self, cfg: VisionConfig, size: int, tokens: int, device: torch.device, dtype: torch.dtype, *, trained: bool
    ) -> Iterator[tuple[str, Trial]]:
        """A batch of `size` in the types of a step, by name. tokens: of an image that the norm sees, with its patches
        dropped. dtype: the parameters'; autocast's is asked for. trained: whether these have gradients.
        """
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(trained)

        side, patches, width = cfg.image_size, cfg.num_patches, cfg.width
        pixels = torch.randint(256, (size, 3, side, side), generator=generator, device=device, dtype=torch.uint8)
        if cfg.conv_stem is None:
            yield "patch_rows", (self.patch_rows, patch_rows, (pixels, cfg.patch_size, half))
        of_patches = drawn(size, patches, width, dtype=half)
        of_parameters = drawn(width, dtype=dtype), drawn(1 + patches, width, dtype=dtype)
        yield "add_positions", (self.add_positions, add_positions, (of_patches, *of_parameters))
        norm = LayerNorm(width).to(device, dtype).requires_grad_(trained)
        yield "ln_pre", (self.norm, _norm, (drawn(size, tokens, width, dtype=half), norm))

    def install(self, visual: VisionTransformer) -> None:
        norm: Any = visual.ln_pre
        norm.forward = partial(self.norm, norm=norm)  # hooks stay around it
        visual.add_positions = self.add_positions
        if isinstance(visual.conv1, PatchConv):
            visual.conv1.patch_rows = self.patch_rows

    def _compiled(self, function: Callable) -> Callable:
        compiled = torch.compile(function, dynamic=False)

        def run(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            return (compiled if len(x) in self.sizes else function)(x, *others, **named)

        return run


def _norm(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    return LayerNorm.forward(norm, x)
