"""Seconds of a step, phase by phase: computation, communication, and how much of them overlaps.

Cost of a block of width w, per token of L and forward:

    GEMMs        (8 + 4 ratio) w^2 flops, at GEMMS of the profile's rate                split over T ranks
    attention    4 P^2 w / L flops, P: L rounded up to full tiles; see `_attention`      split over T ranks
    the rest     w times the remainder of the profile's efficiency at ViT-L-14's width   split over T ranks in part
    sums         two of m L w values over the node's links                               T > 1

A backward takes two forwards. Rates of a profile are sustained rates. Unless measurements showed otherwise, a transfer
costs only the time by which it exceeds the phase that it overlaps. The constants were measured on H200s (docs/results).
docs/concepts/planner.md lists the phases; tests/plan/test_plan_measured.py compares the estimates with measured rows.

Sizes: m samples, L tokens of one, M micro-batches, R of them with cached activations, B global batch, D embedding
width, W GPUs, T tensor-parallel ranks.
"""

from dataclasses import dataclass

from infcl.config.precision import PRECISIONS
from infcl.config.preset import sums_gradients_on_host
from infcl.models.attention import BLOCK, HEADS, LONGEST, SHORT, fits
from infcl.models.config import kept_patches
from infcl.models.flops import forward_flops
from infcl.plan.profile import Gpu
from infcl.plan.setting import Setting

GEMMS = 0.91  # share of the rate of an 8192^3 GEMM
ATTENTION, ONE_TILE, BLOCKS = 0.4, 0.25, 0.3  # likewise: cuDNN's attention; the Triton kernels in one tile, in blocks
TILE = 128  # tokens: cuDNN's attention computes 50 as 128, and 257 as 384
MASKED = 2.0  # relative time of a tile of cuDNN's attention with a mask
UNSPLIT = 0.43  # norms and residuals, which each of T ranks computes in full
_WIDTH, _TOKENS = 1024, 257  # sizes at which a profile's efficiencies were measured
# Host seconds to issue a block's forward (a backward takes two); one of a block's sums over tensor-parallel ranks (two
# per forward, three per backward); a block's hooks in ZeRO-3, per pass.
BLOCK_SECONDS, EAGER_BLOCK_SECONDS = 0.00047, 0.0006
SUM_SECONDS = 0.000255
HOOKS_SECONDS, HOOKS_WAIT = 0.00042, 0.00015  # time of the host, and time that GPUs wait
SUMS_SHOW = 0.67  # share of the tensor-parallel communication that no computation hides
LEAD_SECONDS, HOP_SECONDS = 0.0003, 0.0014  # host seconds per loss: before its first long kernel, and per hop
STEP_BYTES, HOP_BYTES = 42, 16  # bytes read and written per row and width of features, once per step and per hop
STAGE_3_LIVE = 1e9  # parameters: DeepSpeed's stage3_max_live_parameters
UPDATE_BYTES = 128.0  # per parameter: DeepSpeed flattens, casts, measures and clips, besides the rank's state


@dataclass(frozen=True)
class Phase:
    """A phase of a step. It overlaps `room` seconds of other phases, and only the remainder lengthens the step."""

    name: str
    seconds: float
    room: float = 0.0
    overlaps: str = ""

    @property
    def exposed(self) -> float:
        return max(0.0, self.seconds - self.room)


def phases_of(setting: Setting) -> list[Phase]:
    """Return the phases of one step. The sum of their `exposed` seconds is the step's time."""
    towers = tower_phases(setting)
    gpus = [*towers, *loss_phases(setting), *_zero_phases(setting, towers)]
    computing, host = sum(phase.exposed for phase in gpus), _host_seconds(setting) + _loss_host_seconds(setting)
    # If host and GPUs take equally long, neither hides the other fully, because blocks are wide or narrow.
    together = (computing**4 + host**4) ** 0.25
    overlap = host + computing - together
    return [*gpus, Phase("host", host, overlap, "encode, loss and replay"), *_update_phases(setting)]


def step_seconds(setting: Setting) -> float:
    """Return the seconds per step."""
    return sum(phase.exposed for phase in phases_of(setting))


# ---- towers ----


def tower_phases(setting: Setting) -> list[Phase]:
    """Return the GPU time of all passes over the micro-batches: "encode", "replay" and, for T > 1, their sums."""
    micro_batches, parts = setting.num_micro_batches, setting.tensor_parallel
    forward = _blocks_seconds(setting) + _ends_seconds(setting)
    replayed = (4 if setting.checkpointing else 3) * micro_batches  # in forwards
    phases = [Phase("encode", forward * _encoded(setting)), Phase("replay", forward * replayed)]
    if parts > 1:
        values = setting.micro_batch * sum(tokens * width * layers for tokens, width, layers, _ in _sizes(setting))
        once = 2 * (parts - 1) / parts * 2 * values / (setting.gpu.link_gbs * 1e9)  # per layer, in half precision
        sums = 2 * _forwards(setting) + 2 * micro_batches
        phases.append(Phase("tensor parallel", sums * once, (1 - SUMS_SHOW) * sums * once, "GEMMs"))
    return phases


def _encoded(setting: Setting) -> int:
    """Return the micro-batches that are encoded without a graph: those without cached activations."""
    return setting.num_micro_batches - min(setting.resident, setting.num_micro_batches)


def _forwards(setting: Setting) -> int:
    """Return the forward passes over micro-batches per step, recomputation included; there are M backward passes."""
    return _encoded(setting) + setting.num_micro_batches * (2 if setting.checkpointing else 1)


def _sizes(setting: Setting) -> list[tuple[int, int, int, float]]:
    """Return (tokens, width, layers, MLP ratio) of the image tower and of the text tower."""
    vision, text = setting.model.vision_cfg, setting.model.text_cfg
    tokens = 1 + kept_patches(vision.num_patches, vision.patch_dropout)
    lengths = (tokens, vision), (text.context_length, text)
    return [(length, tower.width, tower.layers, tower.mlp_ratio) for length, tower in lengths]


def _blocks_seconds(setting: Setting) -> float:
    """Return the seconds of one micro-batch's forward through the blocks of both towers."""
    vision, text, parts = setting.model.vision_cfg, setting.model.text_cfg, setting.tensor_parallel
    heads = (vision.head_width, False, None), (text.width // text.heads, not text.no_causal_mask, setting.caption_row)
    rest = _rest(setting.gpu, compiled=setting.compiled)
    rest *= UNSPLIT + (1 - UNSPLIT) / parts
    seconds = 0.0
    for (tokens, width, layers, ratio), (head, causal, row) in zip(_sizes(setting), heads):
        flops = _gemms(width, ratio) / GEMMS + _attention(setting, tokens, width, head, causal=causal, row=row)
        per_token = flops / setting.matmul_rate / parts + width * rest
        seconds += setting.micro_batch * tokens * layers * per_token
    return seconds


def _gemms(width: int, ratio: float) -> float:
    """Return the GEMM flops per token and block."""
    return (8 + 4 * ratio) * width**2


def _attention(setting: Setting, length: int, width: int, head: int, *, causal: bool, row: int | None) -> float:
    """Return the attention flops per token, in full tiles, divided by the share of the rate that attention reaches.

    `row` is the number of token positions per row of packed captions, or None.
    """
    fitting = row // 2 if row else length
    by_triton = setting.attention != "torch" and setting.precision.half_matmuls and head in HEADS
    if by_triton and fits(fitting, causal=causal):
        longest = min(2 * length, fitting)  # packed captions vary in length: a tile holds up to twice the mean
        return _tile_flops(length, own_positions(longest), width) / (ONE_TILE if longest <= LONGEST else BLOCKS)
    slower = MASKED if row or causal else 1.0
    return slower * _tile_flops(row or length, positions(row or length), width) / ATTENTION


def _tile_flops(length: int, computed: int, width: int) -> float:
    """Return the attention flops per token if a kernel computes `computed` token positions for `length` tokens."""
    return 4 * computed**2 / length * width


def positions(length: int) -> int:
    """Return the number of token positions that cuDNN computes."""
    return -(-length // TILE) * TILE


def own_positions(length: int) -> int:
    """Return the token positions that the Triton kernels compute: one tile, or full blocks and a short one."""
    tiles = (tile for tile in (32, 64, LONGEST) if tile >= length)
    return next(tiles, length // BLOCK * BLOCK + SHORT)


def _rest(gpu: Gpu, *, compiled: bool) -> float:
    """Return the seconds per token and unit of width that a forward spends outside GEMMs and attention."""
    efficiency = gpu.compiled_efficiency if compiled else gpu.tower_efficiency
    gemms, attention = 24 * _WIDTH**2, _tile_flops(_TOKENS, positions(_TOKENS), _WIDTH)
    flops = (gemms + 4 * _TOKENS * _WIDTH) / efficiency - gemms / GEMMS - attention / ATTENTION
    return max(0.0, flops) / (gpu.matmul_tflops * 1e12) / _WIDTH


def _ends_seconds(setting: Setting) -> float:
    """Return the seconds of patch embedding and projections, which tensor parallelism does not split."""
    flops = float(sum(forward_flops(setting.model).values()))
    for tokens, width, layers, ratio in _sizes(setting):
        flops -= layers * tokens * (_gemms(width, ratio) + 4 * tokens * width)
    return setting.micro_batch * flops / (setting.matmul_rate * GEMMS)


def _host_seconds(setting: Setting) -> float:
    """Return the host seconds to issue all passes."""
    blocks = setting.model.vision_cfg.layers + setting.model.text_cfg.layers
    forwards, backwards = _forwards(setting), setting.num_micro_batches
    each = BLOCK_SECONDS if setting.compiled else EAGER_BLOCK_SECONDS
    seconds = (forwards + 2 * backwards) * each
    if setting.tensor_parallel > 1:
        seconds += (2 * forwards + 3 * backwards) * SUM_SECONDS
    if setting.zero == 3:
        seconds += (forwards + backwards) * HOOKS_SECONDS
    return setting.gpu.host_factor * blocks * seconds


# ---- the loss and its ring ----


def loss_phases(setting: Setting) -> list[Phase]:
    """Return the phases of the loss: its computation, and the ring or the gathering of features.

    Messages between GPUs of one node do not overlap the loss, since that gained nothing. Messages between nodes do.
    """
    gpu, width, size, rows = setting.gpu, setting.model.embed_dim, setting.gpus, setting.loss_rows
    compute = 8.0 * rows * setting.global_batch * width / (setting.matmul_rate * gpu.loss_efficiency)
    if setting.loss in ("clip", "open_clip"):
        gathered = 2 * 4.0 * setting.global_batch * width / _bus_bandwidth(setting, setting.gpus) * 2
        all_rows = size if setting.loss == "clip" else 1
        return [Phase("loss", compute * all_rows), Phase("gather features", gathered)]
    compute += (STEP_BYTES + HOP_BYTES * (size if size > 1 else 0)) * rows * width / (gpu.hbm_gbs * 1e9)
    return [Phase("loss", compute), *([_ring(setting, compute)] if size > 1 else [])]


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
    return Phase("ring", travelling, travelling - exposed, "loss")


def _lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """Return (seconds of communication, exposed seconds) of a pass. Its last hop carries results only.

    Flat ring: the slowest link limits all hops; those between nodes overlap the computation of a block pair. Two-level
    ring: laps within a node, and between them crossings to the next node, each of which overlaps a lap.
    """
    nodes, size = setting.nodes, setting.gpus
    sizes = block + result, result
    inside, inside_last = (sent / (setting.gpu.link_gbs * 1e9) + 10e-6 for sent in sizes)
    cross, cross_last = (sent / (setting.link.gbs * 1e9) + setting.link.latency_us * 1e-6 for sent in sizes)
    if nodes == 1:
        hops = (size - 1) * inside + inside_last
        return hops, hops
    if not setting.two_level:
        last = max(inside_last, cross_last)
        return (size - 1) * max(cross, inside) + last, (size - 1) * max(cross - compute / size, inside) + last
    hops = (size // nodes - 1) * inside + inside_last
    shown = max(cross - hops - compute / nodes, 0.0)
    return nodes * hops + (nodes - 1) * cross + cross_last, nodes * hops + (nodes - 1) * shown + cross_last


# ---- ZeRO and the update ----


def _zero_phases(setting: Setting, towers: list[Phase]) -> list[Phase]:
    """Return the sums of gradients and the gathering of parameters over the data-parallel ranks."""
    size, micro_batches, parameters = setting.dp_size, setting.num_micro_batches, setting.parameters
    blocks, passes = setting.model.vision_cfg.layers + setting.model.text_cfg.layers, _forwards(setting) + micro_batches
    hooks = [Phase("ZeRO-3 hooks", HOOKS_WAIT * blocks * passes)] if setting.zero == 3 else []
    if size == 1:
        return hooks
    encode, replay = (phase.exposed for phase in towers[:2])
    once = (size - 1) / size * setting.element_bytes * parameters / _bus_bandwidth(setting, size)  # sum or gather
    # An all-reduce costs two of them; stage 1 sums BF16 in FP32. With overlap_comm, sums overlap the backward.
    sums = once * (2 if setting.zero == 0 or (setting.zero == 1 and setting.precision == PRECISIONS["bf16"]) else 1)
    backward = replay * (0.75 if setting.checkpointing else 2 / 3)
    sums, room = (sums * micro_batches, backward) if setting.zero > 1 else (sums, backward / micro_batches)
    overlaps = setting.zero_optimization.get("overlap_comm", False)
    phases = [Phase("gradients", sums, room * overlaps, "the backward")]
    if setting.zero in (1, 2):
        phases.append(Phase("parameters", once))
    elif setting.zero == 3 and parameters <= STAGE_3_LIVE:
        forward = (encode + replay) / (_forwards(setting) + 2 * micro_batches)  # a backward takes two forwards
        phases.append(Phase("parameters", once, forward, "the first forward"))
    elif setting.zero == 3:
        phases.append(Phase("parameters", once * passes, encode + replay, "encode and replay"))
    return phases + hooks


def _bus_bandwidth(setting: Setting, size: int) -> float:
    """Return bytes/s of a ring collective over `size` ranks. Between nodes, all network cards of a node share it."""
    if size * setting.tensor_parallel <= setting.gpus_per_node:
        return setting.gpu.link_gbs * 1e9
    return min(setting.gpu.link_gbs, setting.gpus_per_node * setting.link.gbs) * 1e9


def _update_phases(setting: Setting) -> list[Phase]:
    gpu, own = setting.gpu, setting.parameters / (setting.dp_size if setting.zero else 1)
    around = UPDATE_BYTES * setting.parameters / (gpu.hbm_gbs * 1e9)
    if not setting.offload:
        return [Phase("optimizer", 28.0 * own / (gpu.hbm_gbs * 1e9) + around)]  # reads four numbers, writes three
    adds_up = setting.zero == 3 or sums_gradients_on_host(setting.zero, setting.precision)
    times = setting.num_micro_batches if adds_up else 1  # else the GPU keeps sums until the last one
    return [
        Phase("optimizer on the host", 8.0 * own / (gpu.pcie_gbs * 1e9) + 28.0 * own / 50e9 + around),
        Phase("gradients to it", 4.0 * own * times / (gpu.pcie_gbs * 1e9)),
    ]
