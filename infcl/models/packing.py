"""Captions end to end in rows, so that the text tower computes hardly any padding.

A caption of 20 tokens fills a quarter of the 77 positions that a text tower computes. Under a causal mask nothing after
the pooled token can change its output. So captions are cut after that token and laid end to end in fewer, longer rows.
In a row a token attends to its own caption only, and its position counts from that caption's first token. Features and
gradients equal those of the captions one by one, up to rounding. (With a mask, a token that is not finite makes its
full row not finite: 0 times NaN is NaN.)

`pack_captions` runs on the host, where the lengths are known without waiting for a GPU. `caption_places` computes
positions and masks on the device of the rows; `caption_spans` serves attention that needs no mask. CLIP's forward takes
{"texts": [m, L]}, or {"texts": [r, R], "text_ends": [m]}.

Shapes: m captions, L context_length, r rows of R token positions (R = `row_length(L)`).
"""

import bisect
from typing import Any

import torch

from infcl.models.config import TextConfig
from infcl.models.open_clip_config import TextInput

Texts = dict[str, torch.Tensor]
ALIGNED = 16  # token positions: the alignment of a mask's rows that fused attention needs
ROW_STEPS = 64  # r is rounded up in steps of m / 64, so that the allocator sees few sizes


def packs(cfg: TextConfig | TextInput) -> bool:
    """Return whether a tower's captions can be packed: a causal mask, and no pooling at a fixed position."""
    if isinstance(cfg, TextInput):
        return False  # open_clip's towers take captions one by one
    return not cfg.no_causal_mask and cfg.pool_type in ("argmax", "eos")


def row_length(context_length: int) -> int:
    """Return R: room for two captions of full length, or any number of short ones."""
    return -(-2 * context_length // ALIGNED) * ALIGNED


def check_length(texts: torch.Tensor, context_length: int) -> None:
    """ValueError for texts that are not [m, L], L at most context_length."""
    if texts.ndim != 2 or texts.shape[1] > context_length:
        raise ValueError(
            f"texts of shape {list(texts.shape)}: this tower takes [m, L] with L <= context_length {context_length}"
        )


def pooled_places(texts: Any, pool_type: str, eos_id: int) -> Any:
    """Return where each caption of int64 [m, L] is pooled, [m]: at its largest id, or its first `eos_id` (else 0).

    Takes a tensor or a NumPy array.
    """
    return texts.argmax(1) if pool_type == "argmax" else ((texts == eos_id) * 1).argmax(1)


def pack_captions(texts: torch.Tensor, cfg: TextConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack captions into rows, on the host.

    Long captions come first, and each goes to the fullest row that has room for it. The remainder holds pad_id. The
    time grows as m log m: 2 ms of a core for 1,024. It runs in NumPy on one thread, since torch would share the work
    among threads and wait for the slowest while data workers use the cores.

    Args:
        texts: int64 [m, L].
        cfg: of the text tower.

    Returns:
        rows int64 [r, R], and ends int64 [m], where in the flat rows each caption is pooled; pinned if `texts` is.
    """
    import numpy as np  # the towers themselves need torch alone

    check_length(texts, cfg.context_length)
    ids, count, pinned = texts.numpy(), len(texts), texts.is_pinned()
    found = pooled_places(ids, cfg.pool_type, cfg.eos_id)
    length, step = row_length(cfg.context_length), max(1, -(-count // ROW_STEPS))
    starts, num_rows = _placed((found + 1).tolist(), length)
    num_rows = max(2, -(-num_rows // step) * step)  # compiled code specialises on a size of 1
    rows = torch.empty(num_rows, length, dtype=torch.int64, pin_memory=pinned)
    ends = torch.empty(count, dtype=torch.int64, pin_memory=pinned)
    first, flat, place = np.array(starts, np.int64), rows.view(-1).numpy(), np.arange(ids.shape[1])
    flat.fill(cfg.pad_id)
    kept = place <= found[:, None]  # [m, L]
    flat[(first[:, None] + place)[kept]] = ids[kept]
    ends.numpy()[:] = first + found
    return rows, ends


def _placed(needs: list[int], length: int) -> tuple[list[int], int]:
    """Where in the flat rows captions of so many tokens begin, and how many rows of `length` they fill."""
    starts, count = [0] * len(needs), 0
    rooms: list[tuple[int, int]] = []  # (places left, row), sorted
    for caption in sorted(range(len(needs)), key=needs.__getitem__, reverse=True):
        needed = needs[caption]
        at = bisect.bisect_left(rooms, (needed, 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row, count = length, count, count + 1
        starts[caption] = row * length + length - room
        bisect.insort(rooms, (room - needed, row))
    return starts, count


def caption_places(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's position in its caption, int64 [r, R], and the attention mask, bool [r, 1, R, R].

    The remainder of a row is treated as one more caption. rows [r, R] and ends [m] are those of `pack_captions`.
    """
    marks = _marks(rows, ends)
    ended = marks.cumsum(1) - marks  # captions of the row that end before a place
    column = torch.arange(rows.shape[1], device=rows.device)
    same = ended[:, :, None] == ended[:, None, :]
    return _positions(marks, column), (same & (column[:, None] >= column)).unsqueeze(1)


def caption_spans(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's position, as `caption_places` does, and each caption's span in the flat rows.

    Spans are int64 [m, 2]: the first position, and the number of tokens. The remainder of a row is in no span. A single
    caption is followed by an empty one, since compiled code specialises on a size of 1.
    """
    positions = _positions(_marks(rows, ends), torch.arange(rows.shape[1], device=rows.device))
    before = positions.flatten()[ends]  # tokens of a caption before its last
    spans = torch.stack([ends - before, before + 1], dim=1)
    return positions, torch.nn.functional.pad(spans, (0, 0, 0, 1)) if len(ends) == 1 else spans


def _marks(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int64 [r, R]: 1 where a caption ends."""
    return torch.zeros(rows.numel(), dtype=torch.int64, device=rows.device).index_fill_(0, ends, 1).view(rows.shape)


def _positions(marks: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    begins = torch.nn.functional.pad(marks[:, :-1], (1, 0), value=1) > 0
    return column - torch.where(begins, column, 0).cummax(1).values


def whole(texts: torch.Tensor) -> Texts:
    return {"texts": texts}


def packed(cfg: TextConfig, texts: torch.Tensor) -> Texts:
    return dict(zip(("texts", "text_ends"), pack_captions(texts, cfg)))


def num_texts(texts: Texts) -> int:
    """m"""
    return len(texts.get("text_ends", texts["texts"]))


def longest(cfg: TextConfig | TextInput, size: int) -> torch.Tensor:
    """Return int64 [size, L]: captions of full length."""
    texts = torch.full((size, cfg.context_length), int(cfg.eos_id == 0))
    texts[:, -1] = cfg.end_id
    return texts
