"""In compiled blocks one half of a micro-batch is computed while the other half's sum is on the wire."""

import dataclasses
import operator
import re

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

from infcl.models import CLIP
from infcl.train.compile import compile_blocks
from tests.lib.ranks import run_ranks
from tests.lib.tensor_parallel import CFG, layout


def orders_of_a_run(rank, world_size):
    """-> for the forward and the backward of two compiled blocks, [(what, buffer)] in the order of the code."""
    from megatron_patches import halves
    from megatron_patches.towers import split_towers

    text = dataclasses.replace(CFG.text_cfg, width=64, context_length=16, mlp_ratio=4.0, layers=2)
    vision = dataclasses.replace(CFG.vision_cfg, width=32, head_width=8, layers=1)
    model = CLIP(dataclasses.replace(CFG, text_cfg=text, vision_cfg=vision))
    split_towers(model, layout(world_size).tp_group)
    halves.LEAST_ELEMENTS = 1
    assert compile_blocks(model, torch.device("cpu"), "amp_bf16", {8}, way=halves.IN_HALVES, blocks_of_a_run=2)
    torch.compiler.reset()  # what was tried on a copy is made again, to be seen

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            y = model.transformer(torch.zeros(8, 16, 64, requires_grad=True))
        y.sum().backward()

    _, codes = run_and_get_code(step)
    pattern = (
        r"_c10d_functional\.(all_reduce_|wait_tensor)\.default\(.*?(buf\d+)|extern_kernels\.(?:add)?(mm)\(.*(buf\d+)"
    )
    found = [re.findall(pattern, code.split("def call(")[1]) for code in codes]
    return [[(sent or product, own or other) for sent, own, product, other in names] for names in found]


@pytest.mark.slow
def test_compiled_blocks_multiply_while_they_send():
    """Between a sum's start and its wait the other half is computed; only the last of a run has nothing beside it."""
    for forward, backward in run_ranks(orders_of_a_run, 2, timeout=200):
        for names, bare in ((forward, 1), (backward, 0)):
            starts = [i for i, (what, _) in enumerate(names) if what == "all_reduce_"]
            assert len(starts) == 8  # two blocks, two layers, two halves
            products = []
            for i in starts:
                wait = names.index(("wait_tensor", names[i][1]), i)
                products.append(sum(what == "mm" for what, _ in names[i:wait]))
            assert all(products[: 8 - bare]), names


def test_waits_come_after_the_starts_that_do_not_need_them():
    """Two halves of two layers, written as autograd traces them: each sum is waited for at once."""
    from megatron_patches.halves import LateWaits

    graph, c10d = torch.fx.Graph(), torch.ops._c10d_functional
    halves, parameter = [graph.placeholder("a"), graph.placeholder("b")], graph.placeholder("w")
    for _ in range(2):
        for i, half in enumerate(halves):
            product = graph.call_function(torch.ops.aten.mm.default, (half, parameter))
            sent = graph.call_function(c10d.all_reduce.default, (product, "sum", "group"))
            graph.call_function(torch.ops.aten.relu.default, (half,))  # as a weight's gradient: nothing waits for it
            halves[i] = graph.call_function(c10d.wait_tensor.default, (sent,))
    graph.output(tuple(halves))
    before = set(graph.nodes)
    LateWaits()(graph)
    graph.lint()
    assert set(graph.nodes) == before
    names = {"mm": "P", "all_reduce": "S", "wait_tensor": "W", "relu": "G"}
    order = "".join(
        names.get(str(node.target).split(".")[-2], "") for node in graph.nodes if node.op == "call_function"
    )
    assert order == "PSGPSG" + "WPSG" + "WPSG" + "WW"


def graph_of_sums(groups):
    """Gradients of two parameters for each group's name, summed as autograd traces it, and each sum waited for."""
    graph, c10d, totals = torch.fx.Graph(), torch.ops._c10d_functional, []
    for i, group in enumerate(groups):
        gradients = [graph.placeholder(f"{name}{i}") for name in "ab"]
        for gradient in gradients:
            gradient.meta["val"] = None
        total = graph.call_function(c10d.all_reduce_coalesced.default, (gradients, "sum", group))
        parts = [graph.call_function(operator.getitem, (total, k)) for k in range(2)]
        totals += [graph.call_function(c10d.wait_tensor.default, (part,)) for part in parts]
    graph.output(tuple(totals))
    return graph


@pytest.mark.parametrize(("groups", "messages"), [("ttt", 1), ("t", 1), ("tu", 2), ("", 0)])
def test_a_graph_sends_all_gradients_of_one_group_at_once(groups, messages):
    """And every parameter gets the sum of its own. Those of several groups are left as they are."""
    from megatron_patches.halves import LateWaits

    graph = graph_of_sums(groups)
    LateWaits()(graph)
    graph.lint()
    sums = [node for node in graph.nodes if "all_reduce_coalesced" in str(node.target)]
    assert len(sums) == messages
    output = next(node for node in graph.nodes if node.op == "output")
    parts = [wait.args[0] for wait in output.args[0]]
    summed = [total.args[0][index].name for total, index in (part.args for part in parts)]
    assert summed == [f"{name}{i}" for i in range(len(groups)) for name in "ab"]


@pytest.mark.parametrize("trained", [True, False])
def test_blocks_of_pass_1_and_frozen_ones_are_whole_graphs(trained):
    """A norm whose gradients nobody wants sends none. Asking for them would break the graph."""
    from megatron_patches.linear import SampleParallelNorm, Sharing

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    norm = SampleParallelNorm(8).requires_grad_(trained)
    norm.sharing = Sharing(dist.group.WORLD, sequence_parallel=True)
    compiled = torch.compile(lambda x: norm(x), backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    with torch.set_grad_enabled(not trained):
        assert torch.equal(compiled(x), norm(x))
    dist.destroy_process_group()
