"""Token ids to text features (before normalisation): open_clip's text tower, whose parameters sit at the top level.

open_clip's state dict has `transformer.resblocks...`, `token_embedding.weight`, `positional_embedding`, `ln_final` and
`text_projection` next to `visual.*`, without a prefix; hence CLIP *is* a TextTower with an image tower, by inheritance.

Shapes: m texts, L tokens, w width, D embed_dim; r rows of R tokens where texts come packed (packing.py).
"""

import torch
import torch.nn.functional as F
from torch import nn

from infcl.models.config import TextConfig
from infcl.models.packing import caption_places, check_length, pooled_places
from infcl.models.transformer import LayerNorm, Transformer


class TextTower(nn.Module):
    def __init__(
        self,
        cfg: TextConfig,
        embed_dim: int,
        *,
        quick_gelu: bool = False,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        self.context_length = cfg.context_length
        self.vocab_size = cfg.vocab_size
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
            activation_checkpointing=activation_checkpointing,
        )
        self.ln_final = LayerNorm(cfg.width)
        self.text_projection = nn.Parameter(cfg.width**-0.5 * torch.randn(cfg.width, embed_dim))
        self.text_trunk_blocks = 0  # of the trunk; one more than there are: and the pooling
        self.caption_places = caption_places  # or packing.caption_spans, for blocks that take these

    def encode_text(
        self,
        texts: torch.Tensor,
        trunk: torch.Tensor | None = None,
        *,
        part: str = "all",
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode texts, int64 [m, L] with L <= context_length, to [m, D]. Under ZeRO-3 only forward may call it.

        With `ends`, int64 [m], texts are packed rows [r, R] (packing.pack_captions). Padded texts can be encoded in two
        calls: texts -> trunk (part="trunk"), then texts and trunk -> features (part="head").
        """
        if ends is not None:
            return self._encode_packed(texts, ends)
        cut = 0 if part == "all" else self.text_trunk_blocks
        pools_in_trunk = cut > len(self.transformer.resblocks)
        x = self._embed_texts(texts) if trunk is None else trunk
        if part == "trunk":
            x = self.transformer(x, end=cut)
            return self._pool_texts(x, texts) if pools_in_trunk else x
        if not pools_in_trunk:
            x = self._pool_texts(self.transformer(x, begin=cut), texts)
        return x @ self.text_projection

    def _encode_packed(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """int64 [r, R], [m] -> [m, D]"""
        positions, seen = self.caption_places(rows, ends)
        positions = positions.clamp(max=self.context_length - 1)  # the remainder of a row may be longer
        table = self.positional_embedding
        summed = torch.promote_types(table.dtype, torch.float32)  # a position's gradient is a sum over all captions
        x = self.token_embedding(rows) + F.embedding(positions, table.to(summed)).to(table.dtype)
        x = self.transformer(x, seen=seen)  # [r, R, w]
        return self.ln_final(x.flatten(0, 1)[ends]) @ self.text_projection

    def _embed_texts(self, texts: torch.Tensor) -> torch.Tensor:
        check_length(texts, self.context_length)
        return self.token_embedding(texts) + self.positional_embedding[: texts.shape[1]]  # [m, L, w]

    def _pool_texts(self, x: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return self.ln_final(pool_text(x, texts, self.pool_type, self.eos_id))  # [m, w]


class TokenEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def pool_text(x: torch.Tensor, texts: torch.Tensor, pool_type: str, eos_id: int) -> torch.Tensor:
    """[m, L, w] -> [m, w]: the token at the largest id, at the first `eos_id` (0 if there is none), last or first."""
    if pool_type == "first":
        return x[:, 0]
    if pool_type == "last":
        return x[:, -1]
    return x[torch.arange(len(x), device=x.device), pooled_places(texts, pool_type, eos_id)]
