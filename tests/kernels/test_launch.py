"""A kernel launched again is the one that Triton compiled for such arguments, with the same constants."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from infcl.kernels import triton_launch


class _Kernel:
    """Stands for a @triton.jit function: records what is compiled, and what runs without being compiled again."""

    arg_names = ("features_ptr", "count", "BLOCK", "MASKED")
    fn = None

    def __init__(self):
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **constants):
            self.compiled.append((grid, *arguments))
            return _Compiled(self.launched, len(self.compiled))

        return compile_and_run


class _Compiled:
    def __init__(self, launched: list[tuple], number: int):
        self.launched, self.number = launched, number

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((self.number, grid, *arguments))


def test_a_kernel_is_compiled_once_for_each_kind_of_arguments(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launch, "triton", SimpleNamespace(JITFunction=_Kernel, runtime=runtime))
    monkeypatch.setattr(triton_launch, "_compiled", {})
    kernel, memory = _Kernel(), torch.zeros(64)
    usual = {"BLOCK": 64, "MASKED": True, "num_warps": 4}
    start = -memory.data_ptr() // 4 % 4  # the first at a multiple of 16 bytes
    aligned, elsewhere, shifted = memory[start:], memory[start + 4 :], memory[start + 1 :]
    kinds = [(aligned, 32, usual), (shifted, 32, usual), (aligned.double(), 32, usual), (aligned, 33, usual)]
    kinds += [(aligned, 1, usual), (aligned, 32, usual | {"MASKED": False}), (aligned, 32, usual | {"num_warps": 8})]
    kinds += [(aligned, 2**31, usual)]
    for features, count, constants in kinds:
        triton_launch.launch(kernel, 5, features, count, **constants)
    assert len(kernel.compiled) == len(kinds) and not kernel.launched
    active.get_current_device = lambda: 1
    triton_launch.launch(kernel, 5, aligned, 32, **usual)
    assert len(kernel.compiled) == len(kinds) + 1  # another device
    active.get_current_device = lambda: 0
    triton_launch.launch(kernel, 7, elsewhere, 48, **usual)
    (number, grid, features, *rest) = kernel.launched.pop()
    assert (number, grid, rest) == (1, (7, 1, 1), [48, 64, True]) and features is elsewhere
    assert len(kernel.compiled) == len(kinds) + 1


@pytest.mark.parametrize("dim", [24, 512, 768, 1024])
@pytest.mark.parametrize("elements", [2**21, 2**25, 2**27, 2**28])
def test_chunks_fit_the_workspace_and_use_a_good_part_of_it(dim, elements):
    """They are bounded, and never cut into needlessly small pieces."""
    for rows in (1, 1000, 1449, 5000, 11585, 11586, 12000, 17000, 30001, 65536, 10**6):
        for columns in (rows, 4 * rows):
            height, width = triton_launch.chunk_shape(rows, columns, dim, elements, 132)
            assert height % 128 == 0 and width % 256 == 0 and height * width <= elements
            whole = (rows + 127) // 128 * 128 * ((columns + 255) // 256 * 256)
            assert height * width >= min(whole, elements) / 4, (rows, columns, height, width)
