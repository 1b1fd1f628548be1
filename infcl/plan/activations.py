"""Bytes of activations that the towers' graphs keep between forward and backward, computed from sizes.

tests/plan/test_plan_activations.py and tests/megatron_patches/test_megatron_saved.py check them.
"""

from typing import Any, NamedTuple

from infcl.models.config import VisionConfig, kept_patches
from infcl.plan.loads import Load

# Bytes that a block keeps for its backward, per token and unit of width at an MLP ratio of 4: the inputs of both norms,
# of the four linear layers and of GELU, and q, k and v. Attention keeps no matrix. Under autocast, norms keep their
# inputs in FP32; the rest is BF16.
BLOCK_BYTES = {"fp32": 64, "amp_bf16": 36, "bf16": 32, "fp16": 32}
# Bytes that a compiled graph spares under autocast, because it keeps the inputs of norms in their own dtype: half
# precision in the image tower, and in the text tower only for attention's output, once per graph.
_SPARED_BYTES = {"image": 4.0, "text": 2.0}


class _Graph(NamedTuple):
    """Bytes of a tower's graph: kept by the forward, and added by the backward in one block."""

    kept: float
    added: float


def activation_bytes(load: Load) -> float:
    """Return the bytes that the graph of one micro-batch keeps between forward and backward."""
    return sum(graph.kept for graph in _graphs(load).values())


def graph_bytes(load: Load) -> dict[str, float]:
    """Return the bytes of all graphs that exist at the same time.

    The text tower is last in the forward and first in the backward. Its graph is freed before the backward of the image
    tower's blocks.

    Returns:
        {"activations": bytes of the cached graphs, "backward": most bytes that a backward adds}.
    """
    # Autocast keeps half-precision copies of the weights in a graph; with recomputation only those of one block.
    cast = 2.0 * load.trainable if load.precision == "amp_bf16" and not load.checkpointing else 0.0
    graphs = _graphs(load)
    return {
        "activations": activation_bytes(load) * load.cached + cast,
        "backward": max(graphs["text"].added, graphs["image"].added - graphs["text"].kept),
    }


def _graphs(load: Load) -> dict[str, _Graph]:
    """Return {"image", "text"}: the graphs of one micro-batch through the trained blocks.

    With activation checkpointing the forward keeps each block's input, and the backward recomputes one full block. In
    any case the backward adds the gradients of GELU and of the residual stream in one block. Tensor-parallel ranks
    divide the activations between the linear layers that they split; with sequence parallelism they divide all. The
    image tower also keeps its pixels, the first norm's input, and the last block's full output, of which the head takes
    a view.
    """
    vision, text, width = load.model.vision_cfg, load.model.text_cfg, 4 if load.precision == "fp32" else 2
    parts, size = load.tensor_parallel, load.batch.micro_batch_size
    blocks = load.blocks or {"image": vision.layers, "text": text.layers}
    patches = 1 + kept_patches(vision.num_patches, vision.patch_dropout)
    shapes: dict[str, tuple[int, Any]] = {"image": (patches, vision), "text": (text.context_length, text)}
    graphs = {}
    for name, (tokens, tower) in shapes.items():
        stream: float = load.stream_bytes[name]
        inside = (8 + 4 * tower.mlp_ratio) * width / 2  # of which 2 x ratio before GELU and 2 x ratio after it
        outside = BLOCK_BYTES[load.precision] - 24 * width / 2
        if load.precision == "amp_bf16" and load.compiled:
            outside -= _SPARED_BYTES[name]
        if load.sequence_parallel:
            outside, stream = outside / parts, stream / parts
            if load.compiled:  # torch.compile keeps the rows that both column-parallel layers have gathered
                outside += 2 * width * (1 - 1 / parts)
        block, passing = outside + inside / parts, width * (tower.mlp_ratio / parts + 2)
        kept, added = (stream, block + passing) if load.checkpointing else (block, passing)
        numbers = size * tokens * tower.width
        graphs[name] = _Graph(blocks[name] * kept * numbers, added * numbers if blocks[name] else 0.0)
    stream = patches * vision.width * load.stream_bytes["image"]
    around = stream if blocks["image"] else 0.0
    if blocks["image"] == vision.layers:
        around += stream + (3 * vision.image_size**2 + _stem_numbers(vision)) * width
    graphs["image"] = graphs["image"]._replace(kept=graphs["image"].kept + size * around)
    return graphs


def _stem_numbers(vision: VisionConfig) -> int:
    """Return how many numbers per image a convolutional stem keeps: inputs and outputs of its GELUs, not recomputed."""
    numbers, side = 0, vision.image_size
    for channels, _, stride in (vision.conv_stem or ())[:-1]:
        side //= stride
        numbers += 2 * channels * side**2
    return numbers
