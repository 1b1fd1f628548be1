"""Seconds of the towers: products, attention, what is neither, the sums of tensor-parallel ranks; and the host's.

A block of width w takes, for each token of L and forward:

    products     (8 + 4 ratio) w^2 flops, at PRODUCTS of the profile's rate       split over T ranks
    attention    4 P^2 w / L flops, at ATTENTION of it (wider heads are faster),   split over T ranks
                 CAUSAL or MASKED times as long; where --attention auto takes
                 the Triton kernels, in their smaller tiles: of one tile at
                 ONE_TILE of the rate, of blocks at BLOCKS
    the rest     w times what the profile's efficiency leaves at ViT-L-14's width  split but for UNSPLIT
    sums         two of m L w values over the host's links                         T > 1

so narrow towers reach less of a GPU than wide ones. A backward takes two forwards. The constants are of ViT-L-14 on
H200s, profiled block by block (docs/results/tensor_parallel_blocks.csv); ATTENTION lies between those of ViT-B-32,
ViT-B-16 and ViT-L-14 (0.36 to 0.45), all of cuDNN in 16 bits with heads of 64, and is taken for every GPU and type, as
ONE_TILE and BLOCKS are. Of a layer alone, whole sequences, forward and backward, these take 0.22 to 0.31 and 0.20 to
0.25 (docs/results/attention.csv); what cuDNN's copy together there, "the rest" holds already, so a layer of blocks is
planned faster than it is by itself, and steps of ViT-B-16 and ViT-L-14 with it are within 4% (step_attention.csv).

Sizes: m samples, L tokens of one (in cuDNN's attention, of packed captions: places of a row), P: L rounded up to whole
tiles of attention, T tensor-parallel ranks, M micro-batches.
"""

from typing import NamedTuple

from infcl.models.attention import BLOCK, LONGEST, SHORT, unfit
from infcl.models.config import kept_patches
from infcl.models.flops import forward_flops
from infcl.plan.phases import Phase
from infcl.plan.setting import Gpu, Setting

PRODUCTS, ATTENTION, ONE_TILE, BLOCKS = 0.91, 0.4, 0.25, 0.3
TILE = 128  # tokens: cuDNN's attention computes 50 as 128, and 257 as 384
CAUSAL, MASKED = 1.6, 2.0  # of attention, a tile: captions of 77 and rows of 160 (dev/log/2026-11.md)
UNSPLIT = 0.43  # of the rest: norms and residuals, which each of T ranks computes whole, but for sequence parallelism
SIXTEEN_BIT = 0.76  # of the rest where eager blocks hold 16-bit parameters: no casts, a stream of half the bytes
SUMS_SHOW = 0.67  # share of the tensor-parallel communication that no computation hides
_WIDTH, _TOKENS, _HEAD = 1024, 257, 64  # where a profile's efficiencies hold

# The host's, from steps that wait for it. To issue a compiled block's forward (a backward is two), eager 77 / 60 of it;
# a sum over tensor-parallel ranks, of which a forward has two and a backward three; a swap of rows with the products
# of its pieces, of which a forward has four and a backward six for each other rank.
BLOCK_SECONDS, EAGER_BLOCK_SECONDS = 0.00047, 0.0006
SUM_SECONDS, SWAP_SECONDS = 0.000255, 0.00038
HOOK_SECONDS = 0.000047  # around a module in ZeRO-3, a pass: bigG at T = 4, 778 ms a step and 588 under ZeRO-1
MODULES_PER_BLOCK = 9
_NEITHER_HIDES = 4  # exponent: see together


def tower_phases(setting: Setting) -> list[Phase]:
    """GPU seconds of all passes over the micro-batches."""
    micro_batches = setting.num_micro_batches
    encoded = micro_batches - min(setting.resident, micro_batches)
    replayed = (4 if setting.checkpointing else 3) * micro_batches  # in forwards
    forward = sum(_tower_seconds(setting, shape) for shape in _shapes(setting)) + _ends_seconds(setting)
    phases = [
        Phase("encode", forward * encoded, forward * encoded),
        Phase("replay", forward * replayed, forward * replayed),
    ]
    if setting.tensor_parallel > 1:
        phases.append(_travelling(setting, forwards(setting) + micro_batches))
    return phases


def forwards(setting: Setting) -> int:
    """Passes forward over a micro-batch in a step, recomputation included; there are M backward."""
    micro_batches = setting.num_micro_batches
    encoded = micro_batches - min(setting.resident, micro_batches)
    return encoded + micro_batches * (2 if setting.checkpointing else 1)


def host_seconds(setting: Setting) -> float:
    """To issue all passes."""
    block = BLOCK_SECONDS if setting.compiled else EAGER_BLOCK_SECONDS
    there = back = 0.0
    if setting.tensor_parallel > 1 and setting.sequence_parallel:
        there, back = (swaps * (setting.tensor_parallel - 1) * SWAP_SECONDS for swaps in (4, 6))
    elif setting.tensor_parallel > 1:
        there, back = 2 * SUM_SECONDS, 3 * SUM_SECONDS
    if setting.zero == 3:
        there, back = there + MODULES_PER_BLOCK * HOOK_SECONDS, back + MODULES_PER_BLOCK * HOOK_SECONDS
    blocks = setting.model.vision_cfg.layers + setting.model.text_cfg.layers
    calls = forwards(setting) * (block + there) + setting.num_micro_batches * (2 * block + back)
    return setting.gpu.host_factor * blocks * calls


def together(gpus: float, host: float) -> float:
    """Seconds of what the host issues and the GPUs compute: a step is wide blocks and narrow ones, forwards and
    backwards, so where both take equally long neither hides behind the other whole.

    The exponent fits ViT-L-14 at T = 2 with 64, 128 and 256 samples.
    """
    return (gpus**_NEITHER_HIDES + host**_NEITHER_HIDES) ** (1 / _NEITHER_HIDES)


class _Shape(NamedTuple):
    """Of a tower. attention: a token's flops, of a forward in whole tiles, over what of the rate these have."""

    tokens: int
    width: int
    layers: int
    mlp_ratio: float
    attention: float


def _shapes(setting: Setting) -> list[_Shape]:
    """The image tower's and the text tower's."""
    vision, text = setting.model.vision_cfg, setting.model.text_cfg
    tokens, length = 1 + kept_patches(vision.num_patches, vision.patch_dropout), text.context_length
    row, causal, head = setting.caption_row, not text.no_causal_mask, text.width // text.heads
    if _ours(setting, tokens, vision.head_width, causal=False):
        images = _own_flops(tokens, tokens, vision.width)
    else:
        images = _flops(tokens, _places(tokens), vision.width) / ATTENTION
    if _ours(setting, row // 2 if row else length, head, causal=causal):
        longest = min(2 * length, row // 2) if row else length  # captions vary: those of twice the mean
        texts = _own_flops(length, longest, text.width)
    else:
        slower = MASKED if row else CAUSAL if causal else 1.0
        texts = slower * _flops(row or length, _places(row or length), text.width) / ATTENTION
    return [
        _Shape(tokens, vision.width, vision.layers, vision.mlp_ratio, images / _wider(vision.head_width)),
        _Shape(length, text.width, text.layers, text.mlp_ratio, texts / _wider(head)),
    ]


def _ours(setting: Setting, length: int, head: int, *, causal: bool) -> bool:
    """Whether the Triton kernels compute a tower's attention."""
    return setting.attention != "torch" and setting.precision != "fp32" and not unfit(length, head, causal=causal)


def _flops(length: int, places: int, width: int) -> float:
    """Of a token, where so many places are computed for `length` of them."""
    return 4 * places**2 / length * width


def _own_flops(length: int, longest: int, width: int) -> float:
    """Of a token of kernels/triton_attention.py, over what it takes of the rate, in tiles for `longest` tokens."""
    return _flops(length, _own_places(longest), width) / (ONE_TILE if longest <= LONGEST else BLOCKS)


def _places(length: int) -> int:
    """That cuDNN computes."""
    return -(-length // TILE) * TILE


def _own_places(length: int) -> int:
    """That kernels/triton_attention.py computes: one tile, or whole blocks and a short one."""
    if length <= LONGEST:
        return next(tile for tile in (32, 64, LONGEST) if tile >= length)
    return length // BLOCK * BLOCK + SHORT


def _wider(head: int) -> float:
    return min(2.0, head / _HEAD)


def _tower_seconds(setting: Setting, shape: _Shape) -> float:
    """A forward of one micro-batch through a tower's blocks."""
    rate, share, width = setting.product_rate, setting.tensor_parallel, shape.width
    products = (8 + 4 * shape.mlp_ratio) * width**2 / (rate * PRODUCTS)
    attention = shape.attention / rate
    rest = width * _rest(setting.gpu, compiled=setting.compiled)
    if not setting.compiled and setting.precision in ("bf16", "fp16"):
        rest *= SIXTEEN_BIT
    split = 1 / share if setting.sequence_parallel else UNSPLIT + (1 - UNSPLIT) / share
    return setting.micro_batch * shape.tokens * shape.layers * ((products + attention) / share + rest * split)


def _rest(gpu: Gpu, *, compiled: bool) -> float:
    """Seconds of a token and unit of width that are neither product nor attention, of a forward."""
    rate, efficiency = gpu.matmul_tflops * 1e12, gpu.compiled_efficiency if compiled else gpu.tower_efficiency
    products, attention = 24 * _WIDTH**2, _flops(_TOKENS, _places(_TOKENS), _WIDTH)
    whole = (products + 4 * _TOKENS * _WIDTH) / (rate * efficiency)
    return max(0.0, whole - products / (rate * PRODUCTS) - attention / (rate * ATTENTION)) / _WIDTH


def _ends_seconds(setting: Setting) -> float:
    """Patches and the projections to features, which tensor parallelism does not split."""
    flops = float(sum(forward_flops(setting.model).values()))
    for shape in _shapes(setting):
        products = (8 + 4 * shape.mlp_ratio) * shape.width**2
        flops -= shape.layers * shape.tokens * (products + 4 * shape.tokens * shape.width)
    return setting.micro_batch * flops / (setting.product_rate * PRODUCTS)


def _travelling(setting: Setting, passes: int) -> Phase:
    """Return the all-reduces of tensor parallelism, two per block and pass; or its gathers and scatters."""
    size, behind = setting.tensor_parallel, "products"
    rows = [(shape.tokens * shape.width, shape.layers) for shape in _shapes(setting)]
    values = setting.micro_batch * sum(row * layers for row, layers in rows)
    once = 2 * (size - 1) / size * 2 * values / (setting.gpu.link_gbs * 1e9)  # of all layers, in 16 bits
    if setting.sequence_parallel:  # half a sum each, 4 forward and 6 backward
        seconds = (4 * forwards(setting) + 6 * setting.num_micro_batches) * once / 2
        return Phase("tensor parallel", seconds, SUMS_SHOW * seconds, behind)
    seconds = 2 * passes * once
    return Phase("tensor parallel", seconds, SUMS_SHOW * seconds, behind)
