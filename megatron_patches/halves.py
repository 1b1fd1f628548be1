"""Compiled blocks that compute one half of a micro-batch while the other half's sum is on the wire.

    attention of half 1 | attention of half 2 | MLP of half 1       | MLP of half 2       | attention of half 1 ...
                          half 1 on the wire    half 2 on the wire    half 1 on the wire    half 2 on the wire

The backward goes the same way, and there weights' gradients hide sums too. Both halves are in one compiled graph, so
nothing is asynchronous but torch's functional collectives, and none is on its way where a graph ends. The order alone
does it: a collective as soon as it can be, a wait when nothing else is left to do before the next collective. A graph
of several blocks leaves but the last block's last sum with nothing beside it.

Halves have twice the launches; below LEAST_ELEMENTS these cost as much as the sums do (docs/megatron.md), and a
micro-batch goes whole. Packed captions do too, which are few rows, and under sequence parallelism all do: its products
hide what they send (products.py).

Shapes: m samples, L tokens, w width.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from infcl.models.transformer import ResidualBlock

LEAST_ELEMENTS = 2**26  # m L w: ViT-L-14 gains 4% at 256 samples (67.4 million) and nothing at 128

_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
_SUMS = _c10d.all_reduce_coalesced.default  # of gradients: linear.py
_STARTS = {_c10d.all_reduce.default, _SUMS}


def in_halves(blocks: Iterable[ResidualBlock], x: torch.Tensor, *seen: torch.Tensor) -> torch.Tensor:
    """[m, L, w] -> [m, L, w], what the blocks compute one after the other; an odd or a small m goes whole, as do
    packed captions.
    """
    halves = list(x.chunk(2)) if not seen and len(x) % 2 == 0 and x.numel() >= LEAST_ELEMENTS else [x]
    for block in blocks:
        halves = [half + block.attn(block.ln_1(half), *seen) for half in halves]
        halves = [half + block.mlp(block.ln_2(half)) for half in halves]
    return torch.cat(halves)


class LateWaits(CustomGraphPass):
    """Moves waits, and what needs them, behind the start of the next collective that does not need them.

    For graphs that change no tensor in place, as those of blocks are. Inductor lets a collective start only after all
    waits that the graph has before the collective's predecessor's end, so its own passes cannot do this later.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        _in_one_message(graph)
        placed: dict[torch.fx.Node, None] = {}  # in their new order
        held: list[torch.fx.Node] = []  # waits, and what needs them, in their old order
        for node in graph.nodes:
            held.append(node)
            now = set(held) if node.op == "output" else _needed(node) if node.target in _STARTS else set()
            for other in sorted(held, key=lambda one: one not in now):
                free = other.target != _WAIT and all(source in placed for source in other.all_input_nodes)
                if free or other in now:
                    placed[other] = None
            held = [other for other in held if other not in placed]
        for before, after in pairwise(placed):
            before.append(after)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _in_one_message(graph: torch.fx.Graph) -> None:
    """All sums of parameters' gradients, which nothing in the graph needs, as one collective where the last one is."""
    sums = [node for node in graph.nodes if node.target == _SUMS]
    if len({node.args[1:] for node in sums}) != 1 or len(sums) == 1:
        return
    gradients = [gradient for node in sums for gradient in node.args[0]]
    with graph.inserting_before(sums[-1]):
        total = graph.call_function(_SUMS, (gradients, *sums[-1].args[1:]))
        total.meta["val"] = [gradient.meta["val"] for gradient in gradients]
    first = 0
    for node in sums:
        for item in list(node.users):
            item.args = (total, first + item.args[1])
        first += len(node.args[0])
        graph.erase_node(node)
    stable_topological_sort(graph)


def _needed(node: torch.fx.Node) -> set[torch.fx.Node]:
    """`node` and all that it needs, directly or not."""
    found: set[torch.fx.Node] = set()
    new = [node]
    while new:
        if (one := new.pop()) not in found:
            found.add(one)
            new.extend(one.all_input_nodes)
    return found


LATE_WAITS: dict[str, Any] = {  # options of torch.compile for blocks that send while they compute
    "post_grad_custom_post_pass": LateWaits(),
    "reorder_for_peak_memory": False,  # it would put a weight's gradient before the sum that it hides
}
IN_HALVES = (
    in_halves,
    LATE_WAITS
    | {
        # Fused kernels may have moved waits forward again: what adds both halves' gradients of a bias.
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
        "score_fusion_memory_threshold": 2**20,  # bytes: no kernel for both halves because both read a bias
    },
)
