"""Pixels to image features (before normalisation): open_clip's VisionTransformer, with an optional convolutional stem.

Shapes: m images, S pixels per side, N patches, w width, D embed_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from infcl.towers.config import VisionConfig, kept_patches
from infcl.towers.transformer import LayerNorm, Transformer

# Of the data set CLIP was trained on, for pixels in [0, 1]; what open_clip writes into preprocess_cfg.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionTransformer(nn.Module):
    """images [m, 3, S, S] -> [m, D] in the compute dtype.

    uint8 images are pixels 0..255 and are normalised here, on their device; floating images are taken as normalised.
    The compute dtype is that of the parameters, or autocast's.
    """

    def __init__(
        self,
        cfg: VisionConfig,
        embed_dim: int,
        *,
        quick_gelu: bool = False,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        self.image_size = cfg.image_size
        self.pool_type = cfg.pool_type
        self.patch_dropout = cfg.patch_dropout
        scale = cfg.width**-0.5
        self.conv1 = _patch_embedding(cfg)
        self.class_embedding = nn.Parameter(scale * torch.randn(cfg.width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(1 + cfg.num_patches, cfg.width))
        self.ln_pre = LayerNorm(cfg.width)
        self.transformer = Transformer(
            cfg.width,
            cfg.layers,
            cfg.heads,
            mlp_ratio=cfg.mlp_ratio,
            quick_gelu=quick_gelu,
            activation_checkpointing=activation_checkpointing,
        )
        self.ln_post = LayerNorm(cfg.width)
        self.proj = nn.Parameter(scale * torch.randn(cfg.width, embed_dim))
        self.trunk_blocks = 0  # of the trunk; one more than there are: and the pooling

    def forward(self, x: torch.Tensor, part: str = "all") -> torch.Tensor:
        """images -> features. In two calls: images -> trunk (part="trunk"), trunk -> features (part="head")."""
        cut = 0 if part == "all" else self.trunk_blocks
        pools_in_trunk = cut > len(self.transformer.resblocks)
        if part != "head":
            x = self._embed(x)
        if part == "trunk":
            x = self.transformer(x, end=cut)
            return self._pool(x) if pools_in_trunk else x
        if not pools_in_trunk:
            x = self._pool(self.transformer(x, begin=cut))
        return x @ self.proj

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        if images.ndim != 4 or images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(
                f"images of shape {list(images.shape)}: this tower takes [m, 3, {self.image_size}, {self.image_size}]"
            )
        if images.dtype == torch.uint8:
            images = normalize_pixels(images)
        x = self.conv1(images.to(self.class_embedding.dtype)).flatten(2).transpose(1, 2)  # [m, N, w]
        class_token = self.class_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([class_token, x], dim=1) + self.positional_embedding.to(x.dtype)  # [m, 1 + N, w]
        if self.training and self.patch_dropout > 0:
            x = drop_patches(x, self.patch_dropout)
        return self.ln_pre(x)

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln_post(x[:, :1] if self.pool_type == "tok" else x[:, 1:]).mean(dim=1)  # [m, w]


def normalize_pixels(images: torch.Tensor) -> torch.Tensor:
    """uint8 [m, 3, S, S] -> float32: (images / 255 - mean) / std, per channel.

    The constants are Python numbers on purpose: a buffer would be cast along with the model (DeepSpeed's bf16 mode
    rounds mean and std to 8 bits), and a tensor made here would be a synchronising copy to the device in every forward.
    """
    channels = [
        images[:, c].float().mul_(1 / (255 * std)).sub_(mean / std)
        for c, (mean, std) in enumerate(zip(IMAGE_MEAN, IMAGE_STD))
    ]
    return torch.stack(channels, dim=1)


def drop_patches(x: torch.Tensor, rate: float) -> torch.Tensor:
    """[m, 1 + N, w] -> [m, 1 + kept_patches(N, rate), w]: class token and a random subset of each image's patches.

    FLIP, arXiv 2212.00794. Draws from torch's generator of x's device: a second pass with its seed drops the same ones.
    """
    m, tokens, width = x.shape
    keep = kept_patches(tokens - 1, rate)
    kept = torch.rand(m, tokens - 1, device=x.device).topk(keep, dim=1).indices + 1  # [m, keep]
    kept = torch.cat([kept.new_zeros(m, 1), kept], dim=1)  # the class token is row 0
    return x.gather(1, kept[:, :, None].expand(-1, -1, width))


class PatchConv(nn.Conv2d):
    """A convolution of patches that do not overlap; on a GPU a matrix product, which cuDNN makes slow work of."""

    def __init__(self, width: int, patch_size: int):
        super().__init__(3, width, patch_size, stride=patch_size, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return patches_times(images, self.weight) if images.is_cuda else super().forward(images)


def patches_times(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """conv2d(images [m, 3, S, S], weight [w, 3, P, P], stride=P) as a product -> [m, w, S / P, S / P].

    A patch of 3 P^2 numbers is filled up with zeros to a multiple of 8: 16 bytes in 16 bits, which the product's fast
    kernels want of every row.
    """
    width, channels, size, _ = weight.shape
    side = images.shape[-1] // size
    fill = -channels * size**2 % 8
    patches = images.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5)  # [m, S/P, S/P, 3, P, P]
    patches, weight = patches.flatten(3).flatten(1, 2), weight.flatten(1)
    if fill:  # F.pad copies in any case
        patches, weight = F.pad(patches, (0, fill)), F.pad(weight, (0, fill))
    return F.linear(patches, weight).transpose(1, 2).unflatten(2, (side, side))


class StemConv(nn.Conv2d):
    """Keeps the spread of its input through the GELU behind it; torch's default shrinks it below the positions' own."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


def _patch_embedding(cfg: VisionConfig) -> nn.Module:
    """One convolution as open_clip has it, or the stem: each entry shrinks the grid by exactly its stride."""
    if cfg.conv_stem is None:
        return PatchConv(cfg.width, cfg.patch_size)
    layers: list[nn.Module] = []
    channels = 3
    for out_channels, kernel, stride in cfg.conv_stem:
        padding = (kernel - stride + 1) // 2
        layers += [StemConv(channels, out_channels, kernel, stride=stride, padding=padding), nn.GELU()]
        channels = out_channels
    return nn.Sequential(*layers[:-1])
