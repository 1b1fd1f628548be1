"""Seconds of a step, phase by phase: what computes, what travels, and what of that hides behind what.

    encode      M - R forwards without a graph             replay    M forwards, backwards, and recomputations
    loss        8 rows B D flops a GPU                     ring      blocks of W ranks, behind the loss
    gradients   reduce (ZeRO 0, 1: once a step; 2, 3: for each micro-batch), with overlap_comm behind the backward: in
                ZeRO-3, and in ZeRO 1 and 2 across hosts
    parameters  gathered: ZeRO 1, 2 after the update; ZeRO 3 in a step's first forward, and those of more than 1e9
                for each pass over a micro-batch, behind that pass
    host        issues encode, loss and replay, mostly while the GPUs compute
    optimizer   reads and writes of the state, and of the gradients around it

A rate of a profile is a sustained one. Unless measurements said otherwise, what is hidden is counted optimistically:
all of a transfer that fits behind its phase. tower_time.py and loss_time.py have the first two lines and the host's.
"""

from infcl.config.preset import sums_gradients_on_host
from infcl.plan.loss_time import loss_host_seconds, loss_phases
from infcl.plan.phases import Phase, hidden
from infcl.plan.setting import Setting, parameters_of
from infcl.plan.tower_time import MODULES_PER_BLOCK, forwards, host_seconds, together, tower_phases

# What GPUs wait around one module in ZeRO-3, a pass, gathering included: from ZeRO-3 against ZeRO-1 (ViT-L-14, M = 8,
# 31 passes) on one H200 (451 and 498 samples/s, 23 ms of it in the update: 19 us) and four (1750 to 1793 and 1869 to
# 1967: 11 to 17 us). Where parameters stay for a step (engine/gather.py) two GPUs agree, within 9% of a step.
HOOK_WAIT_SECONDS = 0.000017
STAGE_3_LIVE = 1e9  # parameters: DeepSpeed's stage3_max_live_parameters
# Of an update, beside the rank's own state: what DeepSpeed flattens, casts, measures and clips, in bytes a parameter.
# From the updates of ViT-L-14 in step.csv: 10 ms in bf16; under autocast 13 to 15 on two GPUs, 8 without ZeRO; 33 to 46
# under ZeRO-3.
AROUND_BYTES = {"16 bits": 77.0, "32 bits": 130.0, "zero0": 55.0, "zero3": 350.0}


def phases_of(setting: Setting) -> list[Phase]:
    """The phases of one step; their `exposed` seconds add up to it."""
    towers = tower_phases(setting)
    gpus = [*towers, *loss_phases(setting, _bus_bandwidth(setting, setting.gpus))]
    gpus += _zero_phases(setting, {phase.name: phase for phase in towers})
    computing, host = sum(phase.exposed for phase in gpus), host_seconds(setting) + loss_host_seconds(setting)
    gpus.append(Phase("host", host, together(computing, host) - computing, "encode, loss and replay"))
    return [*gpus, *_update_phases(setting)]


def step_seconds(setting: Setting) -> float:
    return sum(phase.exposed for phase in phases_of(setting))


def samples_per_second(setting: Setting) -> float:
    return setting.global_batch / step_seconds(setting)


# ---- ZeRO ----


def _zero_phases(setting: Setting, towers: dict[str, Phase]) -> list[Phase]:
    size, micro_batches = setting.dp_size, setting.num_micro_batches
    parameters = parameters_of(setting.model) / setting.tensor_parallel
    width = 2 if setting.precision in ("bf16", "fp16") else 4
    once = (size - 1) / size * width * parameters / _bus_bandwidth(setting, size)  # reduce-scatter or all-gather
    phases = []

    def reduced(seconds: float, room: float, behind: str) -> Phase:
        if setting.overlaps_reductions:
            return hidden("gradients", seconds, room, behind)
        return Phase("gradients", seconds, seconds)

    backward = towers["replay"].exposed * (0.75 if setting.checkpointing else 2 / 3)
    if size > 1:
        if setting.zero == 0:
            phases.append(reduced(2 * once, backward / micro_batches, "the last backward"))
        elif setting.zero == 1:
            sums = 2 * once if setting.precision == "bf16" else once  # float32 on their way too
            phases.append(reduced(sums, backward / micro_batches, "the last backward"))
        else:
            phases.append(reduced(once * micro_batches, backward, "replay"))
        if setting.zero in (1, 2):
            phases.append(Phase("parameters", once, once))
    if setting.zero == 3:
        passes = forwards(setting) + micro_batches
        if size > 1:
            kept = parameters <= STAGE_3_LIVE  # engine/gather.py
            towers_seconds = towers["encode"].exposed + towers["replay"].exposed
            forward = towers_seconds / (forwards(setting) + 2 * micro_batches)  # a backward is two
            computing = forward if kept else towers_seconds
            words = "the first forward" if kept else "encode and replay"
            phases.append(hidden("parameters", once if kept else once * passes, computing, words))
        model = setting.model
        modules = MODULES_PER_BLOCK * (model.vision_cfg.layers + model.text_cfg.layers)
        hooks = HOOK_WAIT_SECONDS * modules * passes
        phases.append(Phase("ZeRO-3 hooks", hooks, hooks))
    return phases


def _bus_bandwidth(setting: Setting, size: int) -> float:
    """Bytes/s of a ring collective over `size` ranks; between hosts all NICs of a host carry a part."""
    if size * setting.tensor_parallel <= setting.gpus_per_node:
        return setting.gpu.link_gbs * 1e9
    return min(setting.gpu.link_gbs, setting.gpus_per_node * setting.link.gbs) * 1e9


# ---- update and pixels ----


def _update_phases(setting: Setting) -> list[Phase]:
    model, gpu = setting.model, setting.gpu
    parameters = parameters_of(model) / setting.tensor_parallel
    own = parameters / (setting.dp_size if setting.zero else 1)
    sixteen = setting.precision in ("bf16", "fp16")
    kind = f"zero{setting.zero}" if setting.zero in (0, 3) else "16 bits" if sixteen else "32 bits"
    around = AROUND_BYTES[kind] * parameters / (gpu.hbm_gbs * 1e9)
    update = 28.0 * own / (gpu.hbm_gbs * 1e9) + around  # reads gradient, master, two moments; writes three of them
    phases = [Phase("optimizer", update, update)]
    if setting.offload:
        seconds = 8.0 * own / (gpu.pcie_gbs * 1e9) + 28.0 * own / 50e9 + around
        adds_up = setting.zero == 3 or sums_gradients_on_host(setting.zero, setting.precision)
        times = setting.num_micro_batches if adds_up else 1  # elsewhere sums stay on the GPU until the last micro-batch
        gradients = 4.0 * own * times / (gpu.pcie_gbs * 1e9)  # float32
        phases = [Phase("optimizer on the host", seconds, seconds), Phase("gradients to it", gradients, gradients)]
    if setting.pixels == "host":
        pixels = setting.rank_batch * 3.0 * model.vision_cfg.image_size**2
        passes = 2 - min(setting.resident, setting.num_micro_batches) / setting.num_micro_batches
        phases.append(Phase("pixels to the GPU", passes * pixels / (gpu.pcie_gbs * 1e9), 0.0, "encode and replay"))
    return phases
