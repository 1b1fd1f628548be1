"""Bytes that graphs of the towers keep between forward and backward, from sizes alone.

Counted by tests/plan/test_plan_memory.py and tests/megatron_patches/test_megatron_saved.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from infcl.models.config import CLIPConfig, VisionConfig, kept_patches

# What a block keeps for its backward, bytes per token and width at an MLP ratio of 4: the inputs of both norms and of
# the four linear layers, q, k and v, and what GELU saw; attention keeps no matrix. Under autocast norms work in fp32
# and keep their inputs so, the rest is bf16. tests/plan/test_plan_memory.py counts them.
BLOCK_BYTES = {"fp32": 64, "amp_bf16": 36, "bf16": 32, "fp16": 32}
# The residual stream under autocast: the convolution's half precision (image), the embedding's FP32 (text).
_STREAM_BYTES = {"fp32": (4, 4), "amp_bf16": (2, 4), "bf16": (2, 2), "fp16": (2, 2)}
# A compiled graph under autocast keeps norms' inputs as they come: in half precision in the image tower, in the text
# tower only attention's output, once per graph. tests/megatron_patches/test_megatron_saved.py counts them.
_SPARED_BYTES = {"image": 4.0, "text": 2.0}


def activation_bytes(cfg: CLIPConfig, **sizes: Any) -> float:
    """Bytes that the graph of one micro-batch keeps from its forward to its backward; sizes: those of `_graphs`."""
    return sum(graph.kept for graph in _graphs(cfg, **sizes).values())


class _Graph(NamedTuple):
    """Of a tower, in bytes: what its forward leaves, and what its backward adds to that in one block."""

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
    """{"image", "text"}: the graphs of one micro-batch, of the blocks that are trained.

    With activation checkpointing the forward leaves the input of every block, and the backward makes one block whole;
    gradients of GELU and the stream pass through one in any case. Tensor-parallel ranks share what is between the
    linear layers they split, with sequence parallelism all. Around the image tower's blocks there are its pixels, the
    first norm's input, and all of the last block's output, of which the head takes a view.
    blocks: how many of a tower's are trained, its last ones; all unless told.
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
        inside = (8 + 4 * tower.mlp_ratio) * width / 2  # of it 2 x ratio each around GELU
        outside = BLOCK_BYTES[precision] - 24 * width / 2
        if precision == "amp_bf16" and compiled:
            outside -= _SPARED_BYTES[name]
        if sequence_parallel:
            outside, stream = outside / tensor_parallel, stream / tensor_parallel
            if compiled:  # torch.compile keeps the rows that both column layers have gathered
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
    """Of an image: what a convolutional stem keeps, which is not recomputed; inputs and outputs of its GELUs."""
    numbers, side = 0, vision.image_size
    for channels, _, stride in (vision.conv_stem or ())[:-1]:
        side //= stride
        numbers += 2 * channels * side**2
    return numbers


def stream_bytes(precision: str) -> dict[str, int]:
    """{"image", "text"}: bytes of a number that one block hands to the next."""
    return dict(zip(("image", "text"), _STREAM_BYTES[precision]))


def graph_bytes(cfg: CLIPConfig, trainable: int, *, resident: int = 1, **sizes: Any) -> dict[str, float]:
    """{"activations", "backward"}: of the graphs that are kept, one at least, and what a backward adds at most.

    The text tower, which comes last in the forward, is first in the backward: its graph is gone when the image tower's
    blocks have their turn.
    sizes: those of `_graphs`. resident: micro-batches that are encoded once.
    """
    # autocast leaves half-precision copies of the weights in a graph; recomputed blocks keep only their own
    cast = 2.0 * trainable if sizes["precision"] == "amp_bf16" and not sizes["checkpointing"] else 0.0
    graphs = _graphs(cfg, **sizes)
    return {
        "activations": activation_bytes(cfg, **sizes) * max(1, resident) + cast,
        "backward": max(graphs["text"].added, graphs["image"].added - graphs["text"].kept),
    }
