"""The loss on 32 ranks, as four hosts of eight GPUs have them: flat and two-level rings equal the float64 loss."""

import pickle
import subprocess
import sys

import torch

from tests.lib.checkout import ROOT
from tests.lib.loss_oracle import Case, averaged, oracle, relative_error

WORLD_SIZE = 32
TWO_LEVEL = {"ring": "two-level", "ranks_per_node": 8}
CASES = [
    (Case("inf_cl", WORLD_SIZE * 3, 24, 50.0), {}),
    (Case("inf_cl", WORLD_SIZE * 3, 24, 50.0), TWO_LEVEL),
    (Case("siglip", WORLD_SIZE * 2, 7, 10.0, bias=-10.0), TWO_LEVEL),
]


def test_losses_of_32_ranks_average_to_the_float64_loss(tmp_path):
    (tmp_path / "cases").write_bytes(pickle.dumps(CASES))
    command = [sys.executable, "tests/lib/many_ranks.py", str(WORLD_SIZE), tmp_path, tmp_path / "cases"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    per_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]
    for (case, options), *results in zip(CASES, *per_rank):
        truth, result = oracle(case), averaged(results)
        for field, value, expected in zip(truth._fields, result, truth):
            if field != "d_bias" or case.name == "siglip":
                assert relative_error(value, expected, floor=1e-3) < 2e-5, (case, options, field)
