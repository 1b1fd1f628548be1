"""Seconds of a step, phase by phase: computation, communication, and how much of them overlaps.

    encode      M - R forwards without a graph              replay    M forwards, backwards and recomputations
    loss        8 rows B D flops per GPU                    ring      blocks of W ranks, overlaps the loss
    gradients   reduced once per step (ZeRO 0, 1) or per micro-batch (2, 3); overlap_comm: during the backward
    parameters  gathered after the update (ZeRO 1, 2), or in a step's first forward (ZeRO 3; more than 1e9: each pass)
    host        issues encode, loss and replay, mostly while the GPUs compute
    optimizer   reads and writes of the optimizer state and of the gradients

Cost of a block of width w, per token of L and forward:

    GEMMs        (8 + 4 ratio) w^2 flops, at GEMMS of the profile's rate                 split over T ranks
    attention    4 P^2 w / L flops, P: L rounded up to full tiles; see `_attention`       split over T ranks
    the rest     w times the remainder of the profile's efficiency at ViT-L-14's width    split except for UNSPLIT
    sums         two of m L w values over the node's links                                T > 1

A backward takes two forwards. Rates of a profile are sustained rates. Unless measurements showed otherwise, a transfer
costs only the time by which it exceeds the phase that it overlaps. The constants were measured on H200s (docs/results).
tests/plan/test_plan_measured.py compares the estimates with measured steps, losses and peaks.

Sizes: m samples, L tokens of one, M micro-batches, R of them with cached activations, B global batch, D embedding
width, W GPUs, T tensor-parallel ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from infcl.config.preset import sums_gradients_on_host
from infcl.models.attention import BLOCK, LONGEST, SHORT, unfit
from infcl.models.config import kept_patches
from infcl.models.flops import forward_flops
from infcl.plan.profile import Gpu
from infcl.plan.setting import Setting, parameters_of

GEMMS = 0.91  # share of the rate of an 8192^3 GEMM
ATTENTION, ONE_TILE, BLOCKS = 0.4, 0.25, 0.3  # likewise: cuDNN's attention; the Triton kernels in one tile, in blocks
TILE = 128  # tokens: cuDNN's attention computes 50 as 128, and 257 as 384
MASKED = 2.0  # relative time of a tile of cuDNN's attention with a mask
UNSPLIT = 0.43  # norms and residuals, which each of T ranks computes in full without sequence parallelism
HALF_PRECISION = 0.76  # relative time of the rest in eager blocks of half-precision weights: no casts, half the bytes
SUMS_SHOW = 0.67  # share of the tensor-parallel communication that no computation hides
_WIDTH, _TOKENS = 1024, 257  # sizes at which a profile's efficiencies were measured

# Host seconds to issue: a block's forward (a backward takes two); a sum over tensor-parallel ranks (two per forward,
# three per backward); a swap of rows (four and six, per other rank); a module's hooks in ZeRO-3, per pass.
BLOCK_SECONDS, EAGER_BLOCK_SECONDS = 0.00047, 0.0006
SUM_SECONDS, SWAP_SECONDS = 0.000255, 0.00038
HOOK_SECONDS, HOOK_WAIT_SECONDS = 0.000047, 0.000017  # time of the host, and time that GPUs wait
MODULES_PER_BLOCK = 9
LEAD_SECONDS, HOP_SECONDS = 0.0003, 0.0014  # host seconds per loss: before its first long kernel, and per hop

LOSS_DEPTH = 100  # columns of features that take as long as the epilogue of a tile of the loss
STEP_BYTES, HOP_BYTES = 42, 16  # bytes read and written per row and width of features, once per step and per hop
STAGE_3_LIVE = 1e9  # parameters: DeepSpeed's stage3_max_live_parameters
# Bytes per parameter that DeepSpeed moves in an update to flatten, cast, measure and clip, besides the rank's state.
AROUND_BYTES = {"half": 77.0, "single": 130.0, "zero0": 55.0, "zero3": 350.0}


@dataclass(frozen=True)
class Phase:
    """A phase of a step: `exposed` of its `seconds` lengthen the step, the rest `overlaps` other phases."""

    name: str
    seconds: float
    exposed: float
    overlaps: str = ""


def _shown(name: str, seconds: float) -> Phase:
    return Phase(name, seconds, seconds)


def _hidden(name: str, seconds: float, room: float, overlaps: str) -> Phase:
    """Return a phase that overlaps `room` seconds of another phase and costs only the remainder."""
    return Phase(name, seconds, max(0.0, seconds - room), overlaps)


def phases_of(setting: Setting) -> list[Phase]:
    """Return the phases of one step. The sum of their `exposed` seconds is the step's time."""
    towers = tower_phases(setting)
    gpus = [*towers, *loss_phases(setting)]
    gpus += _zero_phases(setting, {phase.name: phase for phase in towers})
    computing, host = sum(phase.exposed for phase in gpus), _host_seconds(setting) + _loss_host_seconds(setting)
    # If host and GPUs take equally long, neither hides the other fully, because blocks are wide or narrow.
    together = (computing**4 + host**4) ** 0.25
    return [*gpus, Phase("host", host, together - computing, "encode, loss and replay"), *_update_phases(setting)]


def step_seconds(setting: Setting) -> float:
    """Return the seconds per step."""
    return sum(phase.exposed for phase in phases_of(setting))


def samples_per_second(setting: Setting) -> float:
    """Return the samples/s of all GPUs together."""
    return setting.global_batch / step_seconds(setting)


# ---- towers ----


def tower_phases(setting: Setting) -> list[Phase]:
    """Return the GPU time of all passes over the micro-batches."""
    micro_batches = setting.num_micro_batches
    replayed = (4 if setting.checkpointing else 3) * micro_batches  # in forwards
    towers = _towers(setting)
    forward = sum(_tower_seconds(setting, tower) for tower in towers) + _ends_seconds(setting, towers)
    phases = [_shown("encode", forward * _encoded(setting)), _shown("replay", forward * replayed)]
    if setting.tensor_parallel > 1:
        size, forwards = setting.tensor_parallel, _forwards(setting)
        values = setting.micro_batch * sum(tower.tokens * tower.width * tower.layers for tower in towers)
        once = 2 * (size - 1) / size * 2 * values / (setting.gpu.link_gbs * 1e9)  # one sum per layer, in half precision
        sums = 2 * forwards + (3 if setting.sequence_parallel else 2) * micro_batches
        phases.append(Phase("tensor parallel", sums * once, SUMS_SHOW * sums * once, "GEMMs"))
    return phases


def _forwards(setting: Setting) -> int:
    """Return the forward passes over micro-batches per step, recomputation included; there are M backward passes."""
    return _encoded(setting) + setting.num_micro_batches * (2 if setting.checkpointing else 1)


def _encoded(setting: Setting) -> int:
    """Return the micro-batches that are encoded without a graph: those without cached activations."""
    return setting.num_micro_batches - min(setting.resident, setting.num_micro_batches)


class _Tower(NamedTuple):
    """Sizes of a tower. `attention` is the result of `_attention`."""

    tokens: int
    width: int
    layers: int
    mlp_ratio: float
    attention: float


def _towers(setting: Setting) -> list[_Tower]:
    """Return the image tower and the text tower."""
    vision, text = setting.model.vision_cfg, setting.model.text_cfg
    tokens, length = 1 + kept_patches(vision.num_patches, vision.patch_dropout), text.context_length
    row, causal = setting.caption_row, not text.no_causal_mask
    images = _attention(setting, tokens, vision.width, vision.head_width, causal=False, row=None)
    texts = _attention(setting, length, text.width, text.width // text.heads, causal=causal, row=row)
    return [
        _Tower(tokens, vision.width, vision.layers, vision.mlp_ratio, images),
        _Tower(length, text.width, text.layers, text.mlp_ratio, texts),
    ]


def _attention(setting: Setting, length: int, width: int, head: int, *, causal: bool, row: int | None) -> float:
    """Return the attention flops per token, in full tiles, divided by the share of the rate that attention reaches.

    `row` is the number of token positions per row of packed captions, or None.
    """
    fitting = row // 2 if row else length
    if setting.attention != "torch" and setting.precision != "fp32" and not unfit(fitting, head, causal=causal):
        longest = min(2 * length, fitting)  # packed captions vary in length: a tile holds up to twice the mean
        flops = _tile_flops(length, own_positions(longest), width) / (ONE_TILE if longest <= LONGEST else BLOCKS)
    else:
        slower = MASKED if row or causal else 1.0
        flops = slower * _tile_flops(row or length, positions(row or length), width) / ATTENTION
    return flops


def _tile_flops(length: int, computed: int, width: int) -> float:
    """Return the attention flops per token if a kernel computes `computed` token positions for `length` tokens."""
    return 4 * computed**2 / length * width


def positions(length: int) -> int:
    """Return the number of token positions that cuDNN computes."""
    return -(-length // TILE) * TILE


def own_positions(length: int) -> int:
    """Return the token positions that the Triton kernels compute: one tile, or full blocks and a short one."""
    if length <= LONGEST:
        return next(tile for tile in (32, 64, LONGEST) if tile >= length)
    return length // BLOCK * BLOCK + SHORT


def _gemms(tower: _Tower) -> float:
    """Return the GEMM flops per token and block."""
    return (8 + 4 * tower.mlp_ratio) * tower.width**2


def _tower_seconds(setting: Setting, tower: _Tower) -> float:
    """Return the seconds of one micro-batch's forward through a tower's blocks."""
    rate, share = setting.matmul_rate, setting.tensor_parallel
    rest = tower.width * _rest(setting.gpu, compiled=setting.compiled)
    if not setting.compiled and setting.precision in ("bf16", "fp16"):
        rest *= HALF_PRECISION
    rest *= 1 / share if setting.sequence_parallel else UNSPLIT + (1 - UNSPLIT) / share
    split = (_gemms(tower) / GEMMS + tower.attention) / rate / share
    return setting.micro_batch * tower.tokens * tower.layers * (split + rest)


def _rest(gpu: Gpu, *, compiled: bool) -> float:
    """Return the seconds per token and unit of width that a forward spends outside GEMMs and attention."""
    efficiency = gpu.compiled_efficiency if compiled else gpu.tower_efficiency
    gemms, attention = 24 * _WIDTH**2, _tile_flops(_TOKENS, positions(_TOKENS), _WIDTH)
    flops = (gemms + 4 * _TOKENS * _WIDTH) / efficiency - gemms / GEMMS - attention / ATTENTION
    return max(0.0, flops) / (gpu.matmul_tflops * 1e12) / _WIDTH


def _ends_seconds(setting: Setting, towers: list[_Tower]) -> float:
    """Return the seconds of patch embedding and projections, which tensor parallelism does not split."""
    flops = float(sum(forward_flops(setting.model).values()))
    for tower in towers:
        flops -= tower.layers * tower.tokens * (_gemms(tower) + 4 * tower.tokens * tower.width)
    return setting.micro_batch * flops / (setting.matmul_rate * GEMMS)


def _host_seconds(setting: Setting) -> float:
    """Return the host seconds to issue all passes."""
    block = BLOCK_SECONDS if setting.compiled else EAGER_BLOCK_SECONDS
    forward, backward = block, 2 * block
    if setting.tensor_parallel > 1:
        swaps, sums = (setting.tensor_parallel - 1) * SWAP_SECONDS, SUM_SECONDS
        forward += 4 * swaps if setting.sequence_parallel else 2 * sums
        backward += 6 * swaps if setting.sequence_parallel else 3 * sums
    if setting.zero == 3:
        forward += MODULES_PER_BLOCK * HOOK_SECONDS
        backward += MODULES_PER_BLOCK * HOOK_SECONDS
    blocks = setting.model.vision_cfg.layers + setting.model.text_cfg.layers
    return setting.gpu.host_factor * blocks * (_forwards(setting) * forward + setting.num_micro_batches * backward)


# ---- the loss and its ring ----


def loss_phases(setting: Setting) -> list[Phase]:
    """Return the phases of the loss: its computation, and the ring or the gathering of features.

    Messages between GPUs of one node do not overlap the loss, since that gained nothing. Messages between nodes do.
    """
    gpu, width, size, rows = setting.gpu, setting.model.embed_dim, setting.gpus, setting.loss_rows
    rate = setting.matmul_rate * gpu.loss_efficiency
    if setting.loss in ("clip", "open_clip"):
        compute = 8.0 * rows * setting.global_batch * width / rate * (size if setting.loss == "clip" else 1)
        gathered = 2 * 4.0 * setting.global_batch * width / _bus_bandwidth(setting, setting.gpus) * 2
        return [_shown("loss", compute), _shown("gather features", gathered)]
    depth = (width + LOSS_DEPTH) * 768 / (768 + LOSS_DEPTH)  # loss_efficiency of a profile applies to width 768
    features = (STEP_BYTES + HOP_BYTES * (size if size > 1 else 0)) * rows * width
    compute = size * 8.0 * rows**2 * depth / rate + features / (gpu.hbm_gbs * 1e9)
    return [_shown("loss", compute), *([_ring(setting, compute)] if size > 1 else [])]


def loss_seconds(setting: Setting) -> float:
    """Return the seconds of only the tiled loss and its ring, with no earlier work for the host to run ahead of."""
    gpus = sum(phase.exposed for phase in loss_phases(setting))
    return max(_loss_host_seconds(setting), setting.gpu.host_factor * LEAD_SECONDS + gpus)


def _loss_host_seconds(setting: Setting) -> float:
    """Return the host seconds to issue the tiled loss, which overlap the towers in a step."""
    tiled = setting.loss not in ("clip", "open_clip")
    return setting.gpu.host_factor * (LEAD_SECONDS + setting.gpus * HOP_SECONDS) * tiled


def _ring(setting: Setting, compute: float) -> Phase:
    rows, width = setting.loss_rows, setting.model.embed_dim
    block, result = 2.0 * rows * width + 4 * rows, 4.0 * rows * width  # sends BF16 columns, returns FP32 gradients
    laps = [_lap(setting, compute / 4, block, 4.0 * rows), _lap(setting, 3 * compute / 4, block, result)]
    travelling, exposed = (sum(column) for column in zip(*laps))
    return Phase("ring", travelling, exposed, "loss")


def _lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """Return (seconds of communication, exposed seconds) of a pass. Its last hop carries results only.

    Flat ring: the slowest link limits all hops; those between nodes overlap the computation of a block pair. Two-level
    ring: laps within a node, and between them crossings to the next node, each of which overlaps a lap.
    """
    nodes, size = setting.nodes, setting.gpus
    inside, inside_last = (sent / (setting.gpu.link_gbs * 1e9) + 10e-6 for sent in (block + result, result))
    cross, cross_last = (
        sent / (setting.link.gbs * 1e9) + setting.link.latency_us * 1e-6 for sent in (block + result, result)
    )
    if nodes == 1:
        hops = (size - 1) * inside + inside_last
        return hops, hops
    if not setting.two_level:
        last = max(inside_last, cross_last)
        return (size - 1) * max(cross, inside) + last, (size - 1) * max(cross - compute / size, inside) + last
    hops = (size // nodes - 1) * inside + inside_last
    shown = max(cross - hops - compute / nodes, 0.0)
    return nodes * hops + (nodes - 1) * cross + cross_last, nodes * hops + (nodes - 1) * shown + cross_last


# ---- ZeRO, the update, pixels ----


def _zero_phases(setting: Setting, towers: dict[str, Phase]) -> list[Phase]:
    size, micro_batches, phases = setting.dp_size, setting.num_micro_batches, []
    parameters = parameters_of(setting.model) / setting.tensor_parallel
    width = 2 if setting.precision in ("bf16", "fp16") else 4
    once = (size - 1) / size * width * parameters / _bus_bandwidth(setting, size)  # reduce-scatter or all-gather
    if size > 1:
        # An all-reduce costs two of them; stage 1 sums BF16 in FP32. With overlap_comm, sums overlap the backward.
        sums = once * (2 if setting.zero == 0 or (setting.zero == 1 and setting.precision == "bf16") else 1)
        backward = towers["replay"].exposed * (0.75 if setting.checkpointing else 2 / 3)
        sums, room = (sums * micro_batches, backward) if setting.zero > 1 else (sums, backward / micro_batches)
        phases.append(_hidden("gradients", sums, room * setting.overlaps_reductions, "the backward"))
        if setting.zero in (1, 2):
            phases.append(_shown("parameters", once))
    if setting.zero == 3:
        passes = _forwards(setting) + micro_batches
        computing = towers["encode"].exposed + towers["replay"].exposed
        forward = computing / (_forwards(setting) + 2 * micro_batches)  # a backward takes two forwards
        if size > 1 and parameters <= STAGE_3_LIVE:
            phases.append(_hidden("parameters", once, forward, "the first forward"))
        elif size > 1:
            phases.append(_hidden("parameters", once * passes, computing, "encode and replay"))
        blocks = setting.model.vision_cfg.layers + setting.model.text_cfg.layers
        phases.append(_shown("ZeRO-3 hooks", HOOK_WAIT_SECONDS * MODULES_PER_BLOCK * blocks * passes))
    return phases


def _bus_bandwidth(setting: Setting, size: int) -> float:
    """Return bytes/s of a ring collective over `size` ranks. Between nodes, all network cards of a node share it."""
    if size * setting.tensor_parallel <= setting.gpus_per_node:
        return setting.gpu.link_gbs * 1e9
    return min(setting.gpu.link_gbs, setting.gpus_per_node * setting.link.gbs) * 1e9


def _update_phases(setting: Setting) -> list[Phase]:
    model, gpu = setting.model, setting.gpu
    parameters = parameters_of(model) / setting.tensor_parallel
    own = parameters / (setting.dp_size if setting.zero else 1)
    width = "half" if setting.precision in ("bf16", "fp16") else "single"
    around = AROUND_BYTES[f"zero{setting.zero}" if setting.zero in (0, 3) else width] * parameters / (gpu.hbm_gbs * 1e9)
    phases = [_shown("optimizer", 28.0 * own / (gpu.hbm_gbs * 1e9) + around)]  # reads four numbers, writes three
    if setting.offload:
        adds_up = setting.zero == 3 or sums_gradients_on_host(setting.zero, setting.precision)
        times = setting.num_micro_batches if adds_up else 1  # else the GPU keeps sums until the last one
        phases = [
            _shown("optimizer on the host", 8.0 * own / (gpu.pcie_gbs * 1e9) + 28.0 * own / 50e9 + around),
            _shown("gradients to it", 4.0 * own * times / (gpu.pcie_gbs * 1e9)),
        ]
    if setting.pixels == "host":
        pixels = setting.rank_batch * 3.0 * model.vision_cfg.image_size**2
        passes = 1 + _encoded(setting) / setting.num_micro_batches
        phases.append(Phase("pixels to the GPU", passes * pixels / (gpu.pcie_gbs * 1e9), 0.0, "encode and replay"))
    return phases
