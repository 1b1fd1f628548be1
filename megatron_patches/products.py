"""Products that travel: matrix products over all tensor-parallel ranks' rows, piece by piece as these arrive.

Under sequence parallelism each of T ranks has n rows between the split layers, and T n inside them. The forward of a
column layer gathers rows and a row layer's sums and scatters them; the backward does the opposite, and gathers rows
again for the weight's gradient. Each product is computed a rank's rows at a time, in an order that lets the wire work
beside it: what must be sent first, what has to be received last.

    gather_multiply           y   = gather(x) @ w.T + b               own rows, then the others' as they come
    multiply_scatter          y   = scatter(sum of x @ w.T)           the others' rows, own rows while these are sent
    gather_multiply_both      d_x = gather(d_y) @ w,   d_w = gather(d_y).T @ x
    multiply_scatter_both     d_x = scatter(sum of d_y @ w),   d_w = d_y.T @ gather(x)

Each is one operator of torch, which torch.compile leaves whole. A weight's gradient adds up its T pieces, and scattered
rows those of T ranks, in their own dtype (bfloat16 under autocast). What travels how: exchange.py.

Shapes: n rows of any leading dimensions; `x`, `d_y` hold this rank's n rows or all T n, as the formulas say.
"""

import torch
from torch import Tensor

from infcl.kernels.operators import operator
from megatron_patches.exchange import Exchange, exchange_of


def _gather_multiply(x: Tensor, weight: Tensor, bias: Tensor, size: int, group_name: str) -> Tensor:
    """x [n, in], weight [out, in], bias [out] -> [T n, out]."""
    exchange = exchange_of(group_name, x.device)
    x = x.contiguous()
    arrivals = [exchange.swap(x, step) for step in range(1, size)]
    y = x.new_empty(size * x.shape[0], *x.shape[1:-1], len(weight))
    pieces = _by_rank(y, size)
    torch.addmm(bias, x.flatten(0, -2), weight.T, out=pieces[exchange.rank])
    for arrival in arrivals:
        torch.addmm(bias, arrival.wait().flatten(0, -2), weight.T, out=pieces[arrival.source])
    exchange.finish()
    return y


def _multiply_scatter(x: Tensor, weight: Tensor, size: int, group_name: str) -> Tensor:
    """x [T n, in], weight [out, in] -> [n, out]."""
    exchange = exchange_of(group_name, x.device)
    pieces = _by_rank(x, size)
    sent, arrivals = _send_products(exchange, pieces, weight.T)
    y = x.new_empty(x.shape[0] // size, *x.shape[1:-1], len(weight))
    torch.mm(pieces[exchange.rank], weight.T, out=y.flatten(0, -2))
    for arrival in arrivals:
        y.flatten(0, -2).add_(arrival.wait())
    exchange.finish()
    return y


def _gather_multiply_both(d_y: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str) -> tuple[Tensor, Tensor]:
    """d_y [n, out], x [T n, in], weight [out, in] -> d_x [T n, in], d_weight [out, in]."""
    exchange = exchange_of(group_name, x.device)
    d_y = d_y.contiguous()
    arrivals = [exchange.swap(d_y, step) for step in range(1, size)]
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_pieces, x_pieces = _by_rank(d_x, size), _by_rank(x, size)
    d_rows = d_y.flatten(0, -2)
    torch.mm(d_rows, weight, out=d_pieces[exchange.rank])
    d_weight = d_rows.T @ x_pieces[exchange.rank]
    for arrival in arrivals:
        d_rows = arrival.wait().flatten(0, -2)
        torch.mm(d_rows, weight, out=d_pieces[arrival.source])
        d_weight.addmm_(d_rows.T, x_pieces[arrival.source])
    exchange.finish()
    return d_x, d_weight


def _multiply_scatter_both(d_y: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str) -> tuple[Tensor, Tensor]:
    """d_y [T n, out], x [n, in], weight [out, in] -> d_x [n, in], d_weight [out, in]."""
    exchange = exchange_of(group_name, x.device)
    x = x.contiguous()
    x_arrivals = [exchange.swap(x, step) for step in range(1, size)]
    pieces = _by_rank(d_y, size)
    sent, d_arrivals = _send_products(exchange, pieces, weight)
    d_weight = pieces[exchange.rank].T @ x.flatten(0, -2)
    for arrival in x_arrivals:
        d_weight.addmm_(pieces[arrival.source].T, arrival.wait().flatten(0, -2))
    first, *others = d_arrivals
    d_x = torch.addmm(first.wait(), pieces[exchange.rank], weight)
    for arrival in others:
        d_x.add_(arrival.wait())
    exchange.finish()
    return d_x.view(x.shape), d_weight


def _send_products(exchange: Exchange, pieces: list[Tensor], factor: Tensor):
    """To each other rank its piece's product [n, out]: those, which have to live until they are sent, and arrivals."""
    sent, arrivals = [], []
    for step in range(1, exchange.size):
        sent.append(pieces[(exchange.rank + step) % exchange.size] @ factor)
        arrivals.append(exchange.swap(sent[-1], step))
    return sent, arrivals


def _by_rank(rows: Tensor, size: int) -> list[Tensor]:
    """[T n, ..., width] -> each rank's [n ..., width], a matrix that shares its memory."""
    return [piece.flatten(0, -2) for piece in rows.contiguous().chunk(size)]


# ---- as operators of torch ----


gather_multiply = operator(
    _gather_multiply,
    "(Tensor x, Tensor weight, Tensor bias, int size, str group_name) -> Tensor",
    lambda x, weight, bias, size, group_name: x.new_empty(size * x.shape[0], *x.shape[1:-1], len(weight)),
)
multiply_scatter = operator(
    _multiply_scatter,
    "(Tensor x, Tensor weight, int size, str group_name) -> Tensor",
    lambda x, weight, size, group_name: x.new_empty(x.shape[0] // size, *x.shape[1:-1], len(weight)),
)
_BOTH = "(Tensor d_y, Tensor x, Tensor weight, int size, str group_name) -> (Tensor, Tensor)"


def _fake_both(d_y, x, weight, size, group_name):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


gather_multiply_both = operator(_gather_multiply_both, _BOTH, _fake_both)
multiply_scatter_both = operator(_multiply_scatter_both, _BOTH, _fake_both)
