"""Captions on their way to the text tower: padded, or packed, several captions end to end in one row.

A caption of 20 tokens fills a quarter of the 77 positions that a text tower computes. Under a causal mask nothing after
the pooled token can change its output. So captions are cut after that token and laid end to end in fewer, longer rows.
In a row, a token attends to its own caption only, and positions count from the caption's first token. Features and
gradients equal those of padded captions, up to rounding. (With a mask, one non-finite token makes its full row
non-finite: 0 times NaN is NaN.)

`pack_captions` runs on the host, where the lengths are known without waiting for a GPU. `caption_positions` computes
positions and masks on the device of the rows. `caption_spans` serves attention kernels that need no mask. CLIP's
forward takes {"texts": [m, L]}, or {"texts": [r, R], "text_ends": [m]}.

Shapes: m captions, L context_length, r rows of R token positions (R = `row_length(L)`).
"""

import bisect
from collections.abc import Callable
from typing import Any

import torch

from infcl.models.config import TextConfig
from infcl.models.open_clip_config import TextInput

Texts = dict[str, torch.Tensor]
ALIGNED = 16  # token positions: alignment of a mask's rows that fused attention requires
ROW_STEPS = 64  # r is rounded up in steps of m / 64, so that the allocator sees few sizes


def row_length(context_length: int) -> int:
    """Return R: room for two captions of full length, or any number of short ones."""
    return -(-2 * context_length // ALIGNED) * ALIGNED


def check_length(texts: torch.Tensor, context_length: int) -> None:
    """Raise ValueError unless texts are [m, L] with L <= context_length."""
    if texts.ndim != 2 or texts.shape[1] > context_length:
        raise ValueError(
            f"texts of shape {list(texts.shape)}: this tower takes [m, L] with L <= context_length {context_length}"
        )


def pooled_positions(texts: Any, pool_type: str, eos_id: int) -> Any:
    """Return the position at which each caption is pooled, int64 [m].

    Args:
        texts: int64 [m, L], a tensor or a NumPy array.
        pool_type: "argmax" for the largest id, else the first `eos_id` (0 if there is none).
        eos_id: end-of-text id.
    """
    return texts.argmax(1) if pool_type == "argmax" else ((texts == eos_id) * 1).argmax(1)


def pack_captions(texts: torch.Tensor, cfg: TextConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack captions into rows, on the host.

    Best-fit decreasing: long captions come first, and each goes to the fullest row that has room. The remainder of a
    row holds pad_id. The time is O(m log m): 2 ms on one core for 1,024 captions. NumPy keeps the work on one thread.
    torch would split it over threads and wait for the slowest, while data workers use the cores.

    Args:
        texts: int64 [m, L].
        cfg: config of the text tower.

    Returns:
        rows: int64 [r, R], pinned if `texts` is.
        ends: int64 [m], index in the flat rows at which each caption is pooled; pinned if `texts` is.
    """
    import numpy as np  # the towers themselves need torch alone

    check_length(texts, cfg.context_length)
    ids, count, pinned = texts.numpy(), len(texts), texts.is_pinned()
    found = pooled_positions(ids, cfg.pool_type, cfg.eos_id)
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
    """Return where in the flat rows captions of `needs` tokens begin, and how many rows of `length` they fill."""
    starts, count = [0] * len(needs), 0
    rooms: list[tuple[int, int]] = []  # (free token positions, row), sorted
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


def caption_positions(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and attention mask of captions packed by `pack_captions`.

    The remainder of a row is treated as one more caption.

    Args:
        rows: int64 [r, R].
        ends: int64 [m].

    Returns:
        positions: int64 [r, R], each token's position in its caption.
        mask: bool [r, 1, R, R].
    """
    marks = _marks(rows, ends)
    ended = marks.cumsum(1) - marks  # captions of the row that end before a position
    column = torch.arange(rows.shape[1], device=rows.device)
    same = ended[:, :, None] == ended[:, None, :]
    return _positions(marks, column), (same & (column[:, None] >= column)).unsqueeze(1)


def caption_spans(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and spans of packed captions, for attention that needs no mask.

    Arguments and positions are those of `caption_positions`. The remainder of a row is in no span.

    Returns:
        positions: int64 [r, R].
        spans: int64 [m, 2], a caption's first index in the flat rows and its number of tokens. For m = 1 an empty span
            follows, because compiled code specialises on a size of 1.
    """
    positions = _positions(_marks(rows, ends), torch.arange(rows.shape[1], device=rows.device))
    before = positions.flatten()[ends]  # tokens before a caption's last one
    spans = torch.stack([ends - before, before + 1], dim=1)
    return positions, torch.nn.functional.pad(spans, (0, 0, 0, 1)) if len(ends) == 1 else spans


def _marks(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return int64 [r, R]: 1 where a caption ends."""
    return torch.zeros(rows.numel(), dtype=torch.int64, device=rows.device).index_fill_(0, ends, 1).view(rows.shape)


def _positions(marks: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    begins = torch.nn.functional.pad(marks[:, :-1], (1, 0), value=1) > 0
    return column - torch.where(begins, column, 0).cummax(1).values


def longest(cfg: TextConfig | TextInput, size: int) -> torch.Tensor:
    """Return captions of full length, int64 [size, L]."""
    texts = torch.full((size, cfg.context_length), int(cfg.eos_id == 0))
    texts[:, -1] = cfg.end_id
    return texts


def texts_for_model(text_cfg: TextConfig | TextInput, *, pack: bool) -> Callable[[torch.Tensor], Texts]:
    """Return a function that turns captions int64 [m, L] into text inputs of CLIP's forward; both are on the host."""
    if not (pack and isinstance(text_cfg, TextConfig)):
        return lambda texts: {"texts": texts}
    return lambda texts: dict(zip(("texts", "text_ends"), pack_captions(texts, text_cfg)))
