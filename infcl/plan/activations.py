"""Bytes of activations that the towers' graphs keep between forward and backward, computed from sizes.

tests/plan/test_plan_memory.py and tests/megatron_patches/test_megatron_saved.py check them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from infcl.models.config import CLIPConfig, VisionConfig, kept_patches

# Bytes that a block keeps for its backward, per token and unit of width at an MLP ratio of 4: the inputs of both norms,
# of the four linear layers and of GELU, and q, k and v. Attention keeps no matrix. Under autocast, norms keep their
# inputs in FP32; the rest is BF16. tests/plan/test_plan_memory.py counts them.
BLOCK_BYTES = {"fp32": 64, "amp_bf16": 36, "bf16": 32, "fp16": 32}
# The residual stream under autocast: the convolution's half precision (image), the embedding's FP32 (text).
_STREAM_BYTES = {"fp32": (4, 4), "amp_bf16": (2, 4), "bf16": (2, 2), "fp16": (2, 2)}
# Bytes that a compiled graph spares under autocast, because it keeps the inputs of norms in their own dtype: half
# precision in the image tower, and in the text tower only for attention's output, once per graph.
# tests/megatron_patches/test_megatron_saved.py counts them.
_SPARED_BYTES = {"image": 4.0, "text": 2.0}


def activation_bytes(cfg: CLIPConfig, **sizes: Any) -> float:
    """Return the bytes that the graph of one micro-batch keeps between forward and backward.

    Args:
        cfg: the model's config.
        sizes: arguments of `_graphs`.
    """
    return sum(graph.kept for graph in _graphs(cfg, **sizes).values())


class _Graph(NamedTuple):
    """Bytes of a tower's graph: kept by the forward, and added by the backward in one block."""

    kept: float
    added: float


def _graphs(
    cfg: CLIPConfig,
    *,
    micro_batch_size: int,
    precision: str,
    checkpointing: bool,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    blocks: Mapping[str, int] | None = None,
    compiled: bool = True,
) -> dict[str, _Graph]:
    """Return {"image", "text"}: the graphs of one micro-batch through the trained blocks.

    With activation checkpointing the forward keeps each block's input, and the backward recomputes one full block. In
    any case the backward adds the gradients of GELU and of the residual stream in one block. Tensor-parallel ranks
    divide the activations between the linear layers that they split; with sequence parallelism they divide all. The
    image tower also keeps its pixels, the first norm's input, and the last block's full output, of which the head takes
    a view.

    `blocks` is the number of trained blocks per tower, counted from the last (None: all).
    """
    vision, text, width = cfg.vision_cfg, cfg.text_cfg, 4 if precision == "fp32" else 2
    shapes: dict[str, tuple[int, Any]] = {
        "image": (1 + kept_patches(vision.num_patches, vision.patch_dropout), vision),
        "text": (text.context_length, text),
    }
    graphs = {}
    for name, (tokens, tower) in shapes.items():
        stream: float = stream_bytes(precision)[name]
        layers = tower.layers if blocks is None else blocks[name]
        inside = (8 + 4 * tower.mlp_ratio) * width / 2  # of which 2 x ratio before GELU and 2 x ratio after it
        outside = BLOCK_BYTES[precision] - 24 * width / 2
        if precision == "amp_bf16" and compiled:
            outside -= _SPARED_BYTES[name]
        if sequence_parallel:
            outside, stream = outside / tensor_parallel, stream / tensor_parallel
            if compiled:  # torch.compile keeps the rows that both column-parallel layers have gathered
                outside += 2 * width * (1 - 1 / tensor_parallel)
        block, passing = outside + inside / tensor_parallel, width * (tower.mlp_ratio / tensor_parallel + 2)
        kept, added = (layers * stream, block + passing) if checkpointing else (layers * block, passing)
        numbers = micro_batch_size * tokens * tower.width
        graphs[name] = _Graph(kept * numbers, added * numbers if layers else 0.0)
    trained = vision.layers if blocks is None else blocks["image"]
    stream = shapes["image"][0] * vision.width * stream_bytes(precision)["image"]
    around = stream if trained else 0.0
    if trained == vision.layers:
        around += stream + (3 * vision.image_size**2 + stem_numbers(vision)) * width
    graphs["image"] = graphs["image"]._replace(kept=graphs["image"].kept + micro_batch_size * around)
    return graphs


def stem_numbers(vision: VisionConfig) -> int:
    """Return how many numbers per image a convolutional stem keeps: inputs and outputs of its GELUs, not recomputed."""
    numbers, side = 0, vision.image_size
    for channels, _, stride in (vision.conv_stem or ())[:-1]:
        side //= stride
        numbers += 2 * channels * side**2
    return numbers


def stream_bytes(precision: str) -> dict[str, int]:
    """Return {"image", "text"}: bytes per number of the residual stream between blocks."""
    return dict(zip(("image", "text"), _STREAM_BYTES[precision]))


def graph_bytes(cfg: CLIPConfig, trainable: int, *, resident: int = 1, **sizes: Any) -> dict[str, float]:
    """Return the bytes of all graphs that exist at the same time.

    The text tower is last in the forward and first in the backward. Its graph is freed before the backward of the image
    tower's blocks.

    Args:
        cfg: the model's config.
        trainable: number of trainable parameters.
        resident: micro-batches with cached activations; at least one graph counts.
        sizes: arguments of `_graphs`.

    Returns:
        {"activations": bytes of the cached graphs, "backward": most bytes that a backward adds}.
    """
    # Autocast keeps half-precision copies of the weights in a graph; with recomputation only those of one block.
    cast = 2.0 * trainable if sizes["precision"] == "amp_bf16" and not sizes["checkpointing"] else 0.0
    graphs = _graphs(cfg, **sizes)
    return {
        "activations": activation_bytes(cfg, **sizes) * max(1, resident) + cast,
        "backward": max(graphs["text"].added, graphs["image"].added - graphs["text"].kept),
    }
