"""Seconds of a step, phase by phase: what computes, what travels, and what of that hides behind what.

    encode      M - R forwards without a graph             replay    M forwards, backwards, and recomputations
    loss        8 rows B D flops a GPU                     ring      blocks of W ranks, behind the loss
    gradients   reduce (ZeRO 0, 1: once a step; 2, 3: for each micro-batch), behind the backward
    parameters  gathered: ZeRO 1, 2 after the update; ZeRO 3 for each pass over a micro-batch, behind that pass
    optimizer   reads and writes of the state

A rate of a profile is a sustained one. What is hidden is counted optimistically: all of a transfer that fits behind its
phase. ZeRO-3's own cost on one GPU (hooks, partitioning) is measured, see HOOK_SECONDS.
"""

from dataclasses import dataclass

from infcl.plan.setting import Setting, parameters_of
from infcl.towers.flops import forward_flops

# ZeRO-3 around one module, a pass, gathering included: from ZeRO-3 against ZeRO-1 (ViT-L-14, M = 8, 31 passes) on one
# H200 (451 and 498 samples/s: 22 us) and four (1793 and 1967: 20 us).
HOOK_SECONDS = 0.000021
MODULES_PER_BLOCK = 9
LOSS_LAUNCH_SECONDS = 0.0017  # host time of a step's loss (docs/log.md)


@dataclass(frozen=True)
class Phase:
    """`seconds` of work; `exposed` of it lengthen the step, the rest hides behind `behind`."""

    name: str
    seconds: float
    exposed: float
    behind: str = ""


def phases_of(setting: Setting) -> list[Phase]:
    """The phases of one step; their `exposed` seconds add up to it."""
    towers = _tower_phases(setting)
    loss = _loss_phases(setting)
    return [*towers, *loss, *_zero_phases(setting, {phase.name: phase for phase in towers}), *_host_phases(setting)]


def step_seconds(setting: Setting) -> float:
    return sum(phase.exposed for phase in phases_of(setting))


def samples_per_second(setting: Setting) -> float:
    return setting.global_batch / step_seconds(setting)


# ---- towers ----


def _tower_phases(setting: Setting) -> list[Phase]:
    gpu, micro_batches = setting.gpu, setting.num_micro_batches
    efficiency = gpu.compiled_efficiency if setting.compiled else gpu.tower_efficiency
    forward = sum(forward_flops(setting.model).values()) * setting.micro_batch / setting.tensor_parallel
    forward /= gpu.matmul_tflops * 1e12 * efficiency
    encoded = micro_batches - min(setting.resident, micro_batches)
    graphs = forward * micro_batches
    backward = forward * micro_batches * (3 if setting.checkpointing else 2)
    phases = [
        Phase("encode", forward * encoded, forward * encoded),
        Phase("replay", graphs + backward, graphs + backward),
    ]
    if setting.tensor_parallel > 1:
        phases.append(_tensor_parallel_phase(setting, encoded))
    return phases


def _tensor_parallel_phase(setting: Setting, encoded: int) -> Phase:
    """Two all-reduces of a block's activations in each forward and each backward, over the host's links, not hidden."""
    model, share = setting.model, setting.tensor_parallel
    values = (1 + model.vision_cfg.num_patches) * model.vision_cfg.width * model.vision_cfg.layers
    values += model.text_cfg.context_length * model.text_cfg.width * model.text_cfg.layers
    passes = encoded + setting.num_micro_batches * (3 if setting.checkpointing else 2)
    size = 2 * values * 2 * setting.micro_batch * passes
    seconds = 2 * (share - 1) / share * size / (setting.gpu.link_gbs * 1e9)
    return Phase("tensor parallel", seconds, seconds)


# ---- loss ----


def _loss_phases(setting: Setting) -> list[Phase]:
    gpu, width, size = setting.gpu, setting.model.embed_dim, setting.gpus
    rows = setting.loss_rows
    compute = 8.0 * rows * setting.global_batch * width / (gpu.matmul_tflops * 1e12 * gpu.loss_efficiency)
    compute += LOSS_LAUNCH_SECONDS
    if setting.loss in ("clip", "open_clip"):
        gathered = 2 * 4.0 * setting.global_batch * width / _bus_bandwidth(setting, size) * 2
        whole = size if setting.loss == "clip" else 1
        return [Phase("loss", compute * whole, compute * whole), Phase("gather features", gathered, gathered)]
    if size == 1:
        return [Phase("loss", compute, compute)]
    block, result = 2.0 * rows * width, 4.0 * rows * width  # bf16 operands travel, fp32 gradients come home
    passes = ((compute / 4, block + 4 * rows, 4.0 * rows), (3 * compute / 4, block + 4 * rows, result))
    travelling = exposed = 0.0
    for seconds, there, home in passes:
        wire, longer = (_two_level_lap if setting.two_level else _flat_lap)(setting, seconds, there, home)
        travelling, exposed = travelling + wire, exposed + longer
    return [Phase("loss", compute, compute), Phase("ring", travelling, exposed, "loss")]


def _flat_lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """(seconds on the wire, seconds beyond computing): one hop at a time, the slowest link sets the pace of all."""
    size = setting.gpus
    hop = _message(setting, block + result, crossing=setting.nodes > 1)
    return size * hop, size * max(0.0, hop - compute / size) + hop


def _two_level_lap(setting: Setting, compute: float, block: float, result: float) -> tuple[float, float]:
    """N laps of G hops within the node; each crossing has its lap to hide behind, the last one of the results none."""
    nodes, lap = setting.nodes, setting.gpus_per_node
    hop = _message(setting, block + result, crossing=False)
    crossing = _message(setting, block + result, crossing=True)
    inside = lap * max(hop, compute / setting.gpus)
    wire = nodes * (lap * hop + crossing)
    return wire, nodes * max(inside, crossing) - compute + _message(setting, result, crossing=nodes > 1)


def _message(setting: Setting, size: float, *, crossing: bool) -> float:
    if crossing:
        return size / (setting.link.gbs * 1e9) + setting.link.latency_us * 1e-6
    return size / (setting.gpu.link_gbs * 1e9) + 10e-6


# ---- ZeRO ----


def _zero_phases(setting: Setting, towers: dict[str, Phase]) -> list[Phase]:
    size, micro_batches = setting.dp_size, setting.num_micro_batches
    parameters = parameters_of(setting.model) / setting.tensor_parallel
    width = 2 if setting.precision in ("bf16", "fp16") else 4
    once = (size - 1) / size * width * parameters / _bus_bandwidth(setting, size)  # reduce-scatter or all-gather
    phases = []
    backward = towers["replay"].exposed * (0.75 if setting.checkpointing else 2 / 3)
    if size > 1:
        if setting.zero == 0:
            phases.append(_hidden("gradients", 2 * once, backward / micro_batches, "the last backward"))
        elif setting.zero == 1:
            phases.append(_hidden("gradients", once, backward / micro_batches, "the last backward"))
        else:
            phases.append(_hidden("gradients", once * micro_batches, backward, "replay"))
        if setting.zero in (1, 2):
            phases.append(Phase("parameters", once, once))
    if setting.zero == 3:
        encoded = micro_batches - min(setting.resident, micro_batches)
        passes = encoded + micro_batches * (3 if setting.checkpointing else 2)
        if size > 1:
            computing = towers["encode"].exposed + towers["replay"].exposed
            phases.append(_hidden("parameters", once * passes, computing, "encode and replay"))
        model = setting.model
        modules = MODULES_PER_BLOCK * (model.vision_cfg.layers + model.text_cfg.layers)
        hooks = HOOK_SECONDS * modules * passes
        phases.append(Phase("ZeRO-3 hooks", hooks, hooks))
    return phases


def _hidden(name: str, seconds: float, room: float, behind: str) -> Phase:
    return Phase(name, seconds, max(0.0, seconds - room), behind)


def _bus_bandwidth(setting: Setting, size: int) -> float:
    """Bytes/s of a ring collective over `size` ranks; between hosts all NICs of a host carry a part."""
    if size * setting.tensor_parallel <= setting.gpus_per_node:
        return setting.gpu.link_gbs * 1e9
    return min(setting.gpu.link_gbs, setting.gpus_per_node * setting.link.gbs) * 1e9


# ---- optimizer and host ----


def _host_phases(setting: Setting) -> list[Phase]:
    model, gpu = setting.model, setting.gpu
    parameters = parameters_of(model) / setting.tensor_parallel
    own = parameters / (setting.dp_size if setting.zero else 1)
    update = 28.0 * own / (gpu.hbm_gbs * 1e9)  # reads gradient, master, two moments; writes three of them
    phases = [Phase("optimizer", update, update)]
    if setting.offload:
        seconds = 8.0 * own / (gpu.pcie_gbs * 1e9) + 28.0 * own / 50e9
        phases = [Phase("optimizer on the host", seconds, seconds)]
    if setting.pixels == "host":
        pixels = setting.rank_batch * 3.0 * model.vision_cfg.image_size**2
        passes = 2 - min(setting.resident, setting.num_micro_batches) / setting.num_micro_batches
        phases.append(Phase("pixels to the GPU", passes * pixels / (gpu.pcie_gbs * 1e9), 0.0, "encode and replay"))
    return phases
