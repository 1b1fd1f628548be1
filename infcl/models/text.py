"""Text tower: token ids to text features before normalisation. It has open_clip's parameters at the top level.

open_clip's state dict has `transformer.resblocks...`, `token_embedding.weight`, `positional_embedding`, `ln_final` and
`text_projection` next to `visual.*`, without a prefix. Hence CLIP inherits from TextTower and adds an image tower.

Shapes: m texts, L tokens, w width, D embed_dim; r rows of R tokens for packed texts (packing.py).
"""

import torch
import torch.nn.functional as F
from torch import nn

from infcl.models.config import TextConfig
from infcl.models.packing import caption_positions, caption_spans, check_length, pooled_positions
from infcl.models.transformer import LayerNorm, Transformer


class TextTower(nn.Module):
    """Text transformer. Its `encode_text` maps token ids [m, L] to features [m, D]."""

    def __init__(
        self,
        cfg: TextConfig,
        embed_dim: int,
        *,
        quick_gelu: bool = False,
    ):
        super().__init__()
        self.context_length, self.vocab_size = cfg.context_length, cfg.vocab_size  # as open_clip's models
        self.pool_type = cfg.pool_type
        self.eos_id = cfg.eos_id
        self.token_embedding = TokenEmbedding(cfg.vocab_size, cfg.width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(cfg.context_length, cfg.width))
        self.transformer = Transformer(
            cfg.width,
            cfg.layers,
            cfg.heads,
            mlp_ratio=cfg.mlp_ratio,
            quick_gelu=quick_gelu,
            causal=not cfg.no_causal_mask,
            gpt_init=True,
        )
        self.ln_final = LayerNorm(cfg.width)
        self.text_projection = nn.Parameter(cfg.width**-0.5 * torch.randn(cfg.width, embed_dim))
        self.attends_spans = False  # whether the attention takes spans of packed captions instead of a mask

    def encode_text(self, texts: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Encode texts. Under ZeRO-3 only forward may call this.

        Args:
            texts: int64 [m, L] with L <= context_length, or packed rows [r, R] (packing.pack_captions).
            ends: int64 [m], with packed rows.

        Returns:
            Features [m, D].
        """
        if ends is not None:
            return self._encode_packed(texts, ends)
        check_length(texts, self.context_length)
        x = self.token_embedding(texts) + self.positional_embedding[: texts.shape[1]]  # [m, L, w]
        x = pool_text(self.transformer(x), texts, self.pool_type, self.eos_id)  # [m, w]
        return self.ln_final(x) @ self.text_projection

    def _encode_packed(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Encode packed rows int64 [r, R] with ends [m] to [m, D]."""
        positions, seen = (caption_spans if self.attends_spans else caption_positions)(rows, ends)
        positions = positions.clamp(max=self.context_length - 1)  # the remainder of a row may be longer
        table = self.positional_embedding
        summed = torch.promote_types(table.dtype, torch.float32)  # a position's gradient sums over all captions
        x = self.token_embedding(rows) + F.embedding(positions, table.to(summed)).to(table.dtype)
        x = self.transformer(x, seen=seen)  # [r, R, w]
        return self.ln_final(x.flatten(0, 1)[ends]) @ self.text_projection


class TokenEmbedding(nn.Embedding):
    """nn.Embedding with OpenAI's initial std of 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def pool_text(x: torch.Tensor, texts: torch.Tensor, pool_type: str, eos_id: int) -> torch.Tensor:
    """Pool [m, L, w] to [m, w].

    Args:
        x: outputs of the blocks, [m, L, w].
        texts: int64 [m, L].
        pool_type: the token to take: "argmax" (largest id), "eos" (first `eos_id`, or position 0 if there is none),
            "last" or "first".
        eos_id: end-of-text id.
    """
    if pool_type == "first":
        return x[:, 0]
    if pool_type == "last":
        return x[:, -1]
    return x[torch.arange(len(x), device=x.device), pooled_positions(texts, pool_type, eos_id)]
