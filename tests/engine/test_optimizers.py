"""Every optimizer, on slices of flat tensors, updates as its peer does on whole parameters in float64."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist

from infcl.engine.optimizers import AdaFactor
from infcl.engine.state import Piece
from tests.lib.engine_steps import TOY, engine_steps, one_process
from tests.lib.loss_oracle import relative_error
from tests.lib.open_clip_stub import import_timm_optimizers
from tests.lib.ranks import run_ranks
from tests.lib.step_oracle import EPS, LR, worst_error

FACTOR_FROM = 8  # the toy's matrices are 20 x 12, 8 x 20, 20 x 10
PEERS = {  # timm is imported for those who run them
    "lion": lambda groups: import_timm_optimizers().Lion(groups, lr=LR, betas=(0.9, 0.98)),
    "lamb": lambda groups: import_timm_optimizers().Lamb(groups, lr=LR, betas=(0.9, 0.98), eps=EPS, max_grad_norm=None),
    "adafactor": lambda groups: import_timm_optimizers().AdafactorBigVision(
        groups, lr=LR, min_dim_size_to_factor=FACTOR_FROM, beta2_cap=0.98, momentum_dtype=torch.float32,
        clipping_threshold=1.0,
    ),
}  # fmt: skip


@contextlib.contextmanager
def small_and_exact():
    """Small matrices factor, and AdaFactor's momentum is fp32, so that 1e-5 can be asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infcl.engine.optimizers.MIN_FACTORED_SIZE", FACTOR_FROM)
        patch.setattr(
            "infcl.engine.parameter_groups.AdaFactor", functools.partial(AdaFactor, momentum_dtype=torch.float32)
        )
        yield


def toy_steps(rank, world_size, preset, opt):
    with small_and_exact():
        return engine_steps(rank, world_size, TOY, preset, opt=opt)


@pytest.mark.first(3)
@pytest.mark.parametrize("opt", PEERS)
@pytest.mark.parametrize(
    ("preset", "world_size"), [("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3_offload", 2)]
)
def test_three_steps_equal_those_of_the_peer_on_whole_parameters(opt, preset, world_size):
    got = run_ranks(toy_steps, world_size, preset, opt)[0]
    with small_and_exact():
        expected = one_process(TOY, world_size, optimizer=PEERS[opt])
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert sum(got.norms, []) == pytest.approx(sum(expected.norms, []), rel=1e-4)
    assert worst_error(got.state, expected.state) < 1e-5


SHAPES = [(70, 40), (33, 129), (64, 3, 40, 40), (5, 40, 3, 41), (48, 7), (31,)]


def sliced_steps(rank, world_size, shape, **options):
    """Four AdaFactor steps on this rank's uneven slice of one parameter -> (the slice, its momentum's dtype)."""
    whole, gradients = problem(shape)
    cuts = [0, *(whole.numel() * (3 * r + 1) // (3 * world_size) for r in range(1, world_size)), whole.numel()]
    own = slice(cuts[rank], cuts[rank + 1])
    tensor = whole.flatten()[own].clone().requires_grad_()
    optimizer = AdaFactor([tensor], lr=0.1, momentum=0.9, beta2_cap=0.95, clipping_threshold=0.7, **options)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.create_state(tensor, [Piece("p", whole.shape, tensor, 0, own.start, tensor.numel())], dist.group.WORLD)
    for gradient in gradients:
        tensor.grad = gradient.flatten()[own]
        optimizer.step()
    return tensor.detach(), optimizer.state[tensor]["exp_avg"].dtype


def problem(shape):
    generator = torch.Generator().manual_seed(1)
    whole, *gradients = torch.randn(5, *shape, generator=generator)
    gradients[1][0] = 0.0  # a row that sees no gradient
    return whole, [gradient * scale for gradient, scale in zip(gradients, (1.0, 1.0, 1e-3, 20.0))]


def peer_steps(shape):
    whole, gradients = problem(shape)
    whole = whole.double().requires_grad_()
    peer = import_timm_optimizers().AdafactorBigVision(
        [whole], lr=0.1, min_dim_size_to_factor=32, beta2_cap=0.95, momentum_dtype=torch.float64,
        clipping_threshold=0.7, weight_decay=0.3,
    )  # fmt: skip
    for gradient in gradients:
        whole.grad = gradient.double()
        peer.step()
    return whole.detach()


@pytest.mark.first(3)
@pytest.mark.parametrize(("world_size", "shape"), [(1, SHAPES[0]), *((3, shape) for shape in SHAPES)], ids=str)
def test_adafactor_factors_whole_matrices_whatever_slices_ranks_own(world_size, shape):
    results = run_ranks(sliced_steps, world_size, shape, momentum_dtype=torch.float32)
    got = torch.cat([tensor for tensor, _ in results]).view(shape)
    assert relative_error(got, peer_steps(shape)) < 1e-6


def test_adafactors_momentum_stays_in_bf16():
    ((got, dtype),) = run_ranks(sliced_steps, 1, (70, 40))
    assert dtype == torch.bfloat16
    whole, expected = problem((70, 40))[0], peer_steps((70, 40))
    moved = (expected - whole).norm()
    assert 1e-5 < float((got.view(70, 40) - expected).norm() / moved) < 2**-8
