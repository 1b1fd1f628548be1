"""The pre-norm transformer that both towers share: a list of residual blocks with open_clip's parameter names.

    x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))

Each module initialises its parameters in its constructor and uses them in its own forward. ZeRO-3 needs both. Under
deepspeed.zero.Init a parameter is a shard as soon as its module's constructor returns, and ZeRO-3 guarantees the full
parameter only during its module's forward.

Shapes: m samples, L tokens, w width, h heads, d = w / h.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Transformer(nn.Module):
    """A stack of residual blocks: [m, L, w] -> [m, L, w] in the dtype of the input.

    `seen` replaces the full or causal mask: bool [m, 1, L, L], or any other value that the blocks' `attend` takes.

    `gpt_init` scales the initial weights with width and depth, as OpenAI and open_clip do for the text tower. Without
    it they have torch's defaults, which open_clip keeps for the image tower.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        *,
        mlp_ratio: float = 4.0,
        quick_gelu: bool = False,
        causal: bool = False,
        gpt_init: bool = False,
    ):
        super().__init__()
        self.activation_checkpointing = False  # recompute each block in the backward
        self.first_trained = 0  # the blocks before it are frozen
        self.on_input_gradient: Callable[[torch.Tensor], None] | None = None  # called with d loss / d input, [m, L, w]
        residual_std = width**-0.5 * (2 * layers) ** -0.5 if gpt_init else None
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, heads, mlp_ratio, quick_gelu=quick_gelu, causal=causal, residual_std=residual_std)
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        if self.on_input_gradient is not None and x.requires_grad:
            x.register_hook(self.on_input_gradient)
        for index, block in enumerate(self.resblocks):
            if index == self.first_trained and torch.is_grad_enabled() and not x.requires_grad:
                # ZeRO-3 reduces a block's gradients when its input has one. Without one it reduces before they exist.
                x = x.detach().requires_grad_()
            # Non-reentrant, because the reentrant form drops the gradient of the first block, whose input needs none.
            # Blocks draw no random numbers, so there is no generator state to preserve.
            given = (x,) if seen is None else (x, seen)
            x = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False) if recompute else block(*given)
        return x


class ResidualBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm. `residual_std` is the initial std of both outputs (None: torch's)."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        *,
        quick_gelu: bool,
        causal: bool,
        residual_std: float | None,
    ):
        super().__init__()
        gpt_init = residual_std is not None
        self.ln_1 = LayerNorm(width)
        self.attn = Attention(
            width, heads, causal=causal, in_std=width**-0.5 if gpt_init else None, out_std=residual_std
        )
        self.ln_2 = LayerNorm(width)
        self.mlp = MLP(
            width,
            int(width * mlp_ratio),
            quick_gelu=quick_gelu,
            in_std=(2 * width) ** -0.5 if gpt_init else None,
            out_std=residual_std,
        )

        self.run: Callable[..., torch.Tensor] = compute_block  # or a compiled one

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(x, self, seen=seen)


def compute_block(x: torch.Tensor, block: ResidualBlock, *, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a block: [m, L, w] -> [m, L, w]. The block is an argument, so all blocks share one compiled graph."""
    x = x + block.attn(block.ln_1(x), seen)
    return x + block.mlp(block.ln_2(x))


class Attention(nn.Module):
    """Multi-head self-attention. `in_proj_weight` is q | k | v, stacked along dim 0."""

    def __init__(self, width: int, heads: int, *, causal: bool, in_std: float | None, out_std: float | None):
        super().__init__()
        self.head_width = width // heads
        self.causal = causal
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        if in_std is None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            nn.init.normal_(self.in_proj_weight, std=in_std)
        self.out_proj = Linear(width, width, std=out_std, zero_bias=True)
        self.attend: Callable[..., torch.Tensor] = attend  # or another kernel

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.project_in(x).unflatten(-1, (3, -1, self.head_width))
        return self.out_proj(self.attend(qkv, seen, causal=self.causal).flatten(2))

    def project_in(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.in_proj_weight, self.in_proj_bias)  # [m, L, 3w]


def attend(qkv: torch.Tensor, seen: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
    """Compute attention with torch's fused kernels: q|k|v [m, L, 3, h, d] -> [m, L, h, d].

    `seen` is a mask, bool [m, 1, L, L], or None. A mask replaces `causal`.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [m, h, L, d]
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal and seen is None).transpose(1, 2)


class MLP(nn.Module):
    """The MLP of a block: c_proj(gelu(c_fc(x)))."""

    def __init__(self, width: int, hidden: int, *, quick_gelu: bool, in_std: float | None, out_std: float | None):
        super().__init__()
        self.c_fc = Linear(width, hidden, std=in_std)
        self.activation = quick_gelu_activation if quick_gelu else F.gelu
        self.c_proj = Linear(hidden, width, std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class Linear(nn.Linear):
    """nn.Linear with an optional normal initialisation of its weight, N(0, std^2)."""

    def __init__(self, in_features: int, out_features: int, *, std: float | None = None, zero_bias: bool = False):
        super().__init__(in_features, out_features)
        if std is not None:
            nn.init.normal_(self.weight, std=std)
        if zero_bias:
            nn.init.zeros_(self.bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm: statistics in float32 (in torch's kernels and under autocast), result in the dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)


def quick_gelu_activation(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks, in order.

    A block contains other modules and shares an nn.ModuleList or nn.Sequential with another module of its class. Of
    nested blocks only the innermost count, such as the blocks of a ConvNeXt's stages.
    """
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in module)
            found |= {m: None for m in module if kinds[type(m)] > 1 and next(m.children(), None) is not None}
    return [block for block in found if not any(below in found for below in block.modules() if below is not block)]
