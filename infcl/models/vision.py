"""Image tower: pixels to image features before normalisation.

This is open_clip's VisionTransformer, with an optional convolutional stem.

Shapes: m images, S pixels per side, N patches, w width, D embed_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from infcl.models.config import VisionConfig, kept_patches
from infcl.models.preprocess import CLIP_PREPROCESS, Preprocess, normalize_pixels
from infcl.models.transformer import LayerNorm, Transformer


class VisionTransformer(nn.Module):
    """Vision transformer: images [m, 3, S, S] -> [m, D] in the compute dtype.

    uint8 images are pixels 0..255 and are normalised here, on their device. Floating images must be normalised. The
    compute dtype is that of the parameters, or autocast's.
    """

    def __init__(
        self,
        cfg: VisionConfig,
        embed_dim: int,
        *,
        quick_gelu: bool = False,
        preprocess: Preprocess = CLIP_PREPROCESS,
    ):
        super().__init__()
        self.image_size = cfg.image_size
        self.pool_type = cfg.pool_type
        self.patch_dropout = cfg.patch_dropout
        scale = cfg.width**-0.5
        self.conv1 = _patch_embedding(cfg, preprocess)
        self.class_embedding = nn.Parameter(scale * torch.randn(cfg.width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(1 + cfg.num_patches, cfg.width))
        self.ln_pre = LayerNorm(cfg.width)
        self.transformer = Transformer(
            cfg.width,
            cfg.layers,
            cfg.heads,
            mlp_ratio=cfg.mlp_ratio,
            quick_gelu=quick_gelu,
        )
        self.ln_post = LayerNorm(cfg.width)
        self.proj = nn.Parameter(scale * torch.randn(cfg.width, embed_dim))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._pool(self.transformer(self._embed(images))) @ self.proj

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        if images.ndim != 4 or images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(
                f"images of shape {list(images.shape)}: this tower takes [m, 3, {self.image_size}, {self.image_size}]"
            )
        x = add_positions(self.conv1(images), self.class_embedding, self.positional_embedding)  # [m, 1 + N, w]
        if self.training and self.patch_dropout > 0:
            x = drop_patches(x, self.patch_dropout)
        return self.ln_pre(x)

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln_post(x[:, :1] if self.pool_type == "tok" else x[:, 1:]).mean(dim=1)  # [m, w]


def normalized(images: torch.Tensor, like: Preprocess, dtype: torch.dtype) -> torch.Tensor:
    """Return images in `dtype`. uint8 images are normalised; floating images must be normalised."""
    return (normalize_pixels(images, like) if images.dtype == torch.uint8 else images).to(dtype)


def add_positions(patches: torch.Tensor, class_embedding: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Prepend the class token and add positions: [m, N, w], [w], [1 + N, w] -> [m, 1 + N, w]."""
    class_token = class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
    return torch.cat([class_token, patches], dim=1) + positions.to(patches.dtype)


def drop_patches(x: torch.Tensor, rate: float) -> torch.Tensor:
    """Keep the class token and a random subset of each image's patches (FLIP, arXiv 2212.00794).

    The subset comes from torch's generator of x's device. A second pass with the same seed drops the same patches.

    Args:
        x: [m, 1 + N, w].
        rate: share of patches to drop.

    Returns:
        [m, 1 + kept_patches(N, rate), w].
    """
    m, tokens, width = x.shape
    keep = kept_patches(tokens - 1, rate)
    kept = torch.rand(m, tokens - 1, device=x.device).topk(keep, dim=1).indices + 1  # [m, keep]
    kept = torch.cat([kept.new_zeros(m, 1), kept], dim=1)  # the class token is row 0
    return x.gather(1, kept[:, :, None].expand(-1, -1, width))


class PatchConv(nn.Conv2d):
    """A convolution of non-overlapping patches: [m, 3, S, S] -> [m, N, w]. On a GPU a matmul, faster than cuDNN."""

    def __init__(self, width: int, patch_size: int, preprocess: Preprocess):
        super().__init__(3, width, patch_size, stride=patch_size, bias=False)
        self.preprocess = preprocess

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.is_cuda:
            return patches_times(images, self.weight, self.preprocess)
        return super().forward(normalized(images, self.preprocess, self.weight.dtype)).flatten(2).transpose(1, 2)


def patch_rows(images: torch.Tensor, size: int, dtype: torch.dtype, like: Preprocess = CLIP_PREPROCESS) -> torch.Tensor:
    """Return the normalised patches of images [m, 3, S, S] in `dtype`, [m, N, 3 P^2 + padding].

    Zeros pad a row to a multiple of 8 numbers: 16 bytes in half precision, which fast matmul kernels need.
    """
    patches = images.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5)  # [m, S/P, S/P, 3, P, P]
    if images.dtype == torch.uint8:
        patches = normalize_pixels(patches, like, dim=3)
    rows = patches.to(dtype).flatten(3).flatten(1, 2)
    fill = -rows.shape[-1] % 8
    return F.pad(rows, (0, fill)) if fill else rows  # F.pad copies in any case


def patches_times(images: torch.Tensor, weight: torch.Tensor, like: Preprocess = CLIP_PREPROCESS) -> torch.Tensor:
    """Compute conv2d(images [m, 3, S, S], weight [w, 3, P, P], stride=P) as a matmul -> [m, N, w]."""
    autocast = torch.is_autocast_enabled(images.device.type)
    dtype = torch.get_autocast_dtype(images.device.type) if autocast else weight.dtype
    rows = patch_rows(images, weight.shape[-1], dtype, like)
    columns = weight.flatten(1)
    fill = rows.shape[-1] - columns.shape[1]
    return F.linear(rows, F.pad(columns, (0, fill)) if fill else columns)


class Stem(nn.Sequential):
    """Convolutional stem: [m, 3, S, S] -> [m, N, w]."""

    preprocess: Preprocess

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        return super().forward(normalized(images, self.preprocess, dtype)).flatten(2).transpose(1, 2)


class StemConv(nn.Conv2d):
    """A convolution whose initial weights keep the variance through the following GELU.

    torch's default shrinks the variance below that of the positional embeddings.
    """

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        assert self.bias is not None
        nn.init.zeros_(self.bias)


def _patch_embedding(cfg: VisionConfig, preprocess: Preprocess) -> nn.Module:
    """Return open_clip's single convolution, or the stem, where each entry shrinks the grid by exactly its stride."""
    if cfg.conv_stem is None:
        return PatchConv(cfg.width, cfg.patch_size, preprocess)
    layers: list[nn.Module] = []
    channels = 3
    for out_channels, kernel, stride in cfg.conv_stem:
        padding = (kernel - stride + 1) // 2
        layers += [StemConv(channels, out_channels, kernel, stride=stride, padding=padding), nn.GELU()]
        channels = out_channels
    stem = Stem(*layers[:-1])
    stem.preprocess = preprocess
    return stem
