"""The tile kernels compile for a Hopper GPU, also where none is: what Triton's interpreter does not check."""

import subprocess
import sys

import pytest

PROGRAM = """
from benchmarks.registers import compiled_backward, compiled_forward, usage
for sigmoid, edge in ((False, False), (False, True), (True, True)):
    used = usage(compiled_forward(itemsize=2, sigmoid=sigmoid, masked=True, edge=edge))
    assert 32 < used["registers"] <= 255 and 0 < used["shared"] <= 232448, used
    assert sigmoid or used["stack"] == 0, f"the forward tile spills {used['stack']} bytes"
for masked, most in ((False, 0), (True, 128)):  # masked: a block pair on the diagonal, one of W
    used = usage(compiled_backward(itemsize=2, sigmoid=False, masked=masked))
    assert 0 < used["shared"] <= 232448 and used["stack"] <= most, used
for single in (True, False):
    compiled_backward(itemsize=2, sigmoid=False, masked=True, edge=True, single=single)
compiled_backward(itemsize=2, sigmoid=True, masked=True)
"""


def test_kernels_compile_and_the_softmax_tiles_fit_into_registers():
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
