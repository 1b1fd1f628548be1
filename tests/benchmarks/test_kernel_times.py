"""benchmarks.kernels: a profiler's trace becomes milliseconds of a step, kernel by kernel, and nothing is lost."""

import gzip
import json
import re
import subprocess
import sys

import pytest

from benchmarks.kernels import ATTENTION, kernels_of, kind_of
from benchmarks.rows import read
from tests.lib.checkout import ROOT

EVENTS = [  # of two steps, microseconds; 100 in which no kernel runs
    ("kernel", "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", 0, 300),
    ("kernel", "_forward", 300, 100),
    ("kernel", "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", 500, 500),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1000, 200),
    ("cpu_op", "aten::linear", 0, 5000),
]


def trace_of(events) -> dict:
    events = [dict(zip(("cat", "name", "ts", "dur"), event)) for event in events]
    return {"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}


def test_a_step_has_its_share_of_every_kernel_and_of_the_pauses():
    rows = kernels_of(trace_of(EVENTS), 2)
    found = {row["kind"]: (row["calls"], pytest.approx(row["ms"])) for row in rows}
    assert found == {"products": (1, 0.4), "attention": (0.5, 0.05), "copies": (0.5, 0.1), "between": (0, 0.05)}
    assert sum(row["ms"] for row in rows) == pytest.approx(0.6)  # from the first kernel's start to the last one's end


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_gelu_view_8", "GELU"),
        ("triton_red_fused_gelu_gelu_backward_sum_view_3", "GELU"),
        ("triton_per_fused__to_copy_add_native_layer_norm_view_5", "norms"),
        ("triton_red_fused_sum_view_9", "sums over rows (biases)"),
        ("triton_poi_fused__to_copy_6", "casts"),
        ("_backward", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "between GPUs"),
        ("embedding_backward_feature_kernel", "others"),
    ],
)
def test_inductors_names_say_what_a_kernel_is_of(name, kind):
    assert kind_of(name) == kind


def test_the_names_of_attentions_kernels_are_no_others():
    files = {}
    for path in (ROOT / "infcl" / "kernels").glob("*.py"):
        for name in re.findall(r"@triton\.jit\ndef (\w+)", path.read_text()):
            files.setdefault(name, set()).add(path.name.startswith("triton_attention"))
    assert {name: files[name] for name in ATTENTION} == {name: {True} for name in ATTENTION}


def test_a_trace_becomes_rows_and_shares(tmp_path):
    trace, out = tmp_path / "trace_rank0.json.gz", tmp_path / "kernels.csv"
    trace.write_bytes(gzip.compress(json.dumps(trace_of(EVENTS)).encode()))
    command = [sys.executable, "-m", "benchmarks.kernels", str(trace), "--steps", "2", "--csv", str(out)]
    result = subprocess.run([*command, "--commit", "abc"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[0].split() == ["products", "0.4", "ms", "66.7%"]
    rows = read(out)
    assert len(rows) == 4 and {(row["device"], row["commit"]) for row in rows} == {("NVIDIA H200", "abc")}
    again = subprocess.run([*command, "--commit", "abc"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "has this --label at this commit already" in again.stderr
    assert read(out) == rows
    for broken, why in ((trace_of(EVENTS[-1:]), "no kernel is in it"), (None, "not a gzip")):
        trace.write_bytes(b"{}" if broken is None else gzip.compress(json.dumps(broken).encode()))
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 2 and why in result.stderr.lower().replace("not a gzipped", "not a gzip")
