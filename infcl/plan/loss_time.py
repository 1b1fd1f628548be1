"""Seconds of the loss and of its ring.

A block pair's tiles take what the kernels themselves reckon with (infcl/kernels/shapes.py: waves of whole tiles, depth
and epilogue of each), at the rate that the profile has for 65,536 pairs of width 768. What reads and writes features
once adds its bytes. In a step the host issues all of it while the towers run; alone, the loss takes at least as long as
the host does.

Blocks that GPUs of one host pass on are not hidden: with NCCL's sends overlapping gained nothing there
(docs/results/tiling_h200.csv). The plan adds them, 2% of the loss. Crossings between hosts are taken to hide.
"""

from infcl.kernels import WORKSPACE_BYTES
from infcl.kernels.shapes import backward_cost, chunk_shape, forward_cost
from infcl.plan.phases import Phase
from infcl.plan.setting import Gpu, Setting

# Host seconds of a loss: before its first long kernel, and to issue each hop's work. Set from one GPU's 1.7 ms
# (dev/log/2026-11.md) and from four GPUs' 5.9 ms at 8,192 rows each, where the GPUs need 4.5.
LEAD_SECONDS = 0.0003
HOP_SECONDS = 0.0014
# Bytes per row and width, both sides. Once a step: squares 4, matched gradients 12, their inner product 14, scaling 12.
STEP_BYTES = 42
HOP_BYTES = 16  # around a ring: the travelling gradient zeroed, and added to what came
_REFERENCE = 65536, 768  # rows and width at which a profile's loss_efficiency holds


def loss_phases(setting: Setting, bus_bandwidth: float) -> list[Phase]:
    """The loss, and the ring or the gathering of features around it. bus_bandwidth: of a collective, bytes/s."""
    gpu, width, size = setting.gpu, setting.model.embed_dim, setting.gpus
    rows, slower = setting.loss_rows, gpu.matmul_tflops * 1e12 / setting.product_rate
    if setting.loss in ("clip", "open_clip"):
        compute = slower * 8.0 * rows * setting.global_batch * width / _rate(gpu)
        gathered = 2 * 4.0 * setting.global_batch * width / bus_bandwidth * 2
        whole = size if setting.loss == "clip" else 1
        return [Phase("loss", compute * whole, compute * whole), Phase("gather features", gathered, gathered)]
    hops = HOP_BYTES * size if size > 1 else 0
    compute = slower * size * tile_seconds(gpu, rows, width) + (hops + STEP_BYTES) * rows * width / (gpu.hbm_gbs * 1e9)
    phases = [Phase("loss", compute, compute)]
    if size > 1:
        phases.append(_ring(setting, compute))
    return phases


def loss_seconds(setting: Setting) -> float:
    """Of the tiled loss and its ring alone, with nothing before them that the host could run ahead in."""
    gpus = sum(phase.exposed for phase in loss_phases(setting, 0.0))
    return max(loss_host_seconds(setting), setting.gpu.host_factor * LEAD_SECONDS + gpus)


def loss_host_seconds(setting: Setting) -> float:
    """To issue the loss, which hides behind the towers in a step; the baselines' few products are not counted."""
    if setting.loss != "inf_cl":
        return 0.0
    return setting.gpu.host_factor * (LEAD_SECONDS + setting.gpus * HOP_SECONDS)


def tile_seconds(gpu: Gpu, rows: int, width: int) -> float:
    """Of the tiles of rows x rows, forward and backward, on a GPU that nothing else uses."""
    pairs, reference = _REFERENCE
    whole = 8.0 * pairs**2 * reference / _rate(gpu)
    return whole * _cost(rows, width, gpu.multiprocessors) / _cost(pairs, reference, gpu.multiprocessors)


def _cost(rows: int, width: int, processors: int) -> float:
    shape = chunk_shape(rows, rows, width, WORKSPACE_BYTES // 2, processors)
    backward = backward_cost(rows, rows, width, shape, processors)
    return forward_cost(rows, rows, width, WORKSPACE_BYTES, processors) + backward


def _rate(gpu: Gpu) -> float:
    return gpu.matmul_tflops * 1e12 * gpu.loss_efficiency


def _ring(setting: Setting, compute: float) -> Phase:
    rows, width = setting.loss_rows, setting.model.embed_dim
    block, result = 2.0 * rows * width, 4.0 * rows * width  # bf16 operands travel, fp32 gradients come home
    passes = ((compute / 4, block + 4 * rows, 4.0 * rows), (3 * compute / 4, block + 4 * rows, result))
    laps = [(_two_level_lap if setting.two_level else _flat_lap)(setting, *sizes) for sizes in passes]
    travelling, exposed = (sum(column) for column in zip(*laps))
    return Phase("ring", travelling, exposed, "loss")


def _flat_lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """(seconds on the wire, seconds beyond computing): one hop at a time, the slowest link sets the pace of all. A hop
    between hosts hides behind a block's computation; the last one, of results alone, has none left to hide behind.
    """
    size = setting.gpus
    inside = _message(setting, block + result, crossing=False)
    hop = _message(setting, block + result, crossing=True) if setting.nodes > 1 else 0.0
    last = max(_message(setting, result, crossing=crossing) for crossing in {False, setting.nodes > 1})
    return (size - 1) * max(hop, inside) + last, (size - 1) * max(hop - compute / size, inside) + last


def _two_level_lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """N laps of G hops within the node, the last of each of results alone; each crossing has its lap to hide behind,
    the last one of the results none.
    """
    nodes, lap = setting.nodes, setting.gpus_per_node
    hops = (lap - 1) * _message(setting, block + result, crossing=False) + _message(setting, result, crossing=False)
    crossing, last = (_message(setting, size, crossing=True) for size in (block + result, result))
    hidden = max(crossing - hops - compute / nodes, 0.0)
    return nodes * hops + (nodes - 1) * crossing + last, nodes * hops + (nodes - 1) * hidden + last


def _message(setting: Setting, size: float, *, crossing: bool) -> float:
    if crossing:
        return size / (setting.link.gbs * 1e9) + setting.link.latency_us * 1e-6
    return size / (setting.gpu.link_gbs * 1e9) + 10e-6
