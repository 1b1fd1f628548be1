"""Seconds of a step, phase by phase: what computes, what travels, and what of that hides behind what.

    encode      M - R forwards without a graph             replay    M forwards, backwards, and recomputations
    loss        8 rows B D flops a GPU                     ring      blocks of W ranks, behind the loss
    gradients   reduce (ZeRO 0, 1: once a step; 2, 3: for each micro-batch), behind the backward
    parameters  gathered: ZeRO 1, 2 after the update; ZeRO 3 for each pass over a micro-batch, behind that pass
    optimizer   reads and writes of the state

A rate of a profile is a sustained one. What is hidden is counted optimistically: all of a transfer that fits behind its
phase. ZeRO-3's own cost on one GPU (hooks, partitioning) is measured, see HOOK_SECONDS.
"""

from infcl.plan.loss_time import loss_phases
from infcl.plan.phases import Phase, hidden
from infcl.plan.setting import Setting, parameters_of
from infcl.towers.flops import forward_flops

# ZeRO-3 around one module, a pass, gathering included: from ZeRO-3 against ZeRO-1 (ViT-L-14, M = 8, 31 passes) on one
# H200 (451 and 498 samples/s: 22 us) and four (1793 and 1967: 20 us).
HOOK_SECONDS = 0.000021
MODULES_PER_BLOCK = 9


def phases_of(setting: Setting) -> list[Phase]:
    """The phases of one step; their `exposed` seconds add up to it."""
    towers = _tower_phases(setting)
    loss = loss_phases(setting, _bus_bandwidth(setting, setting.gpus))
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
            phases.append(hidden("gradients", 2 * once, backward / micro_batches, "the last backward"))
        elif setting.zero == 1:
            phases.append(hidden("gradients", once, backward / micro_batches, "the last backward"))
        else:
            phases.append(hidden("gradients", once * micro_batches, backward, "replay"))
        if setting.zero in (1, 2):
            phases.append(Phase("parameters", once, once))
    if setting.zero == 3:
        encoded = micro_batches - min(setting.resident, micro_batches)
        passes = encoded + micro_batches * (3 if setting.checkpointing else 2)
        if size > 1:
            computing = towers["encode"].exposed + towers["replay"].exposed
            phases.append(hidden("parameters", once * passes, computing, "encode and replay"))
        model = setting.model
        modules = MODULES_PER_BLOCK * (model.vision_cfg.layers + model.text_cfg.layers)
        hooks = HOOK_SECONDS * modules * passes
        phases.append(Phase("ZeRO-3 hooks", hooks, hooks))
    return phases


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
