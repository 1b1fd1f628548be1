"""--resident-micro-batches: how many micro-batches cache their activations between the two passes of a step.

Such a micro-batch is encoded once instead of twice, at the cost of its graph's memory. `auto` measures one graph at
start, with zero images and the longest captions. It keeps as many graphs as fit in addition to what a step needs, and
all ranks use the smallest number.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from infcl.config import RunSpec
from infcl.engine.engine import Engine
from infcl.models.config import ModelConfig
from infcl.models.packing import longest, texts_for_model
from infcl.parallel import Parallel, max_over, ranks_of_host
from infcl.plan.memory import HEADROOM, reserved_bytes
from infcl.plan.setting import setting_of_run

_log = logging.getLogger(__name__)


def resident_micro_batches(
    spec: RunSpec,
    engine: Engine,
    model_config: ModelConfig,
    parallel: Parallel,
    *,
    before: Mapping[str, Any] | None = None,
    teacher_width: int = 0,
) -> tuple[int, dict[str, Any]]:
    """Return the number of --resident-micro-batches, at most the M micro-batches of a step. Collective for `auto`.

    Another number sums gradients in another order, and free memory varies between starts. So a resumed run with the
    same micro-batches and ranks keeps at most its first number, and warns if that does not fit. `auto` is 1 with
    --deterministic and on a CPU.

    Args:
        before: the trainer's state in the checkpoint, if any.
        teacher_width: numbers of a teacher's embeddings; its model is on the device.

    Returns:
        The number, and what a checkpoint stores: the number that the run began with, whether it was measured, and for
        which ranks and micro-batches.
    """
    flags, batch = spec.flags, spec.batch
    asked, limit = flags.resident_micro_batches, batch.num_micro_batches
    measures = asked == "auto" and spec.device == "cuda" and not flags.deterministic
    number = 1 if asked == "auto" else min(int(asked), limit)
    if measures and limit > 1:
        captions = longest(model_config.text_cfg, batch.micro_batch_size * flags.texts_per_image)
        texts = texts_for_model(model_config.text_cfg, pack=spec.packs_captions)(captions)
        graph = _graph_bytes(engine, texts, batch.micro_batch_size, model_config, parallel.device)
        room = _free_bytes(parallel.device) - _needed_bytes(spec, engine, model_config, parallel, graph, teacher_width)
        fitting = -max_over(dist.group.WORLD, [-int(room // graph)], parallel.device)[0]  # minimum over ranks
        number = max(1, min(int(fitting), limit))
    own = {"kept": number, "measured": measures, "of": [parallel.world_size, limit, batch.micro_batch_size]}
    began = (before or {}).get("graphs", {})
    if not (measures and began.get("measured") and began["of"] == own["of"]):
        return number, own
    kept = began["kept"]
    if number != kept and parallel.rank == 0:
        means = "gradients are summed in another order" if number < kept else "they stay so many, for the same sums"
        _log.warning("%d micro-batches' graphs fit on the GPU, the run began with %d: %s", number, kept, means)
    return min(number, kept), began


def _graph_bytes(
    engine: Engine,
    texts: dict[str, torch.Tensor],
    size: int,
    model_config: ModelConfig,
    device: torch.device,
) -> int:
    """Return the bytes of device memory that the graph of one micro-batch holds."""
    side = model_config.vision_cfg.image_size
    images = torch.zeros(size, 3, side, side, dtype=torch.uint8, device=device)
    texts = {name: value.to(device) for name, value in texts.items()}
    engine.train(not engine.running_statistics)  # zeros must not change them
    with torch.no_grad():
        engine.encode(images, **texts)  # libraries allocate their workspaces
    before = torch.cuda.memory_allocated(device)
    output = engine.encode(images, **texts)
    held = torch.cuda.memory_allocated(device) - before
    del output
    return max(1, held)


def _free_bytes(device: torch.device) -> float:
    """Return the bytes that a step and its graphs may use: all unused memory except HEADROOM."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free - HEADROOM * total


def _needed_bytes(
    spec: RunSpec,
    engine: Engine,
    model_config: ModelConfig,
    parallel: Parallel,
    graph: int,
    teacher_width: int,
) -> float:
    """Return the bytes of a step without graphs, parameters and optimizer; the last two are allocated already.

    The planner computes it. It does not know towers that open_clip builds; theirs is estimated from one graph's bytes.
    """
    trainable = sum(engine.state.shape(p).numel() for _, p in engine.state.parameters() if p.requires_grad)
    if (planned := model_config.planned) is None:  # gradients and a copy for autocast, a backward's graph, the loss
        return 8 * trainable + graph + 64 * (model_config.embed_dim + teacher_width) * spec.batch.rank_batch_size
    counts = {"all": (trainable, trainable)}
    on_host = ranks_of_host(parallel)
    return reserved_bytes(setting_of_run(spec, planned, counts, ranks_of_host=on_host, teacher=(0, teacher_width)))
