"""Size of the pixel cache: the number of micro-batches whose pixels a rank keeps, from --pixel-cache-gb."""

from collections.abc import Callable
from functools import partial

import torch

from infcl.config import RunSpec
from infcl.models.clip import CLIP
from infcl.models.config import TextConfig
from infcl.models.open_clip_config import TextInput
from infcl.models.packing import Texts, texts_for_model
from infcl.parallel import Parallel, join_parts, max_over, ranks_of_host
from infcl.parallel.host_limits import available_host_bytes
from infcl.step.offload import PixelCache

_SHARE = 0.6  # of the free host memory, for `auto`; workers and page cache need the rest


def build_pixel_cache(
    spec: RunSpec, model: CLIP, parallel: Parallel, *, resident: int, repeats: bool, reserved: float
) -> PixelCache:
    """Build the pixel cache that the flags select.

    Args:
        spec: the resolved run.
        model: the towers, which decide whether pass 2 needs pixels.
        parallel: groups and device of this rank.
        resident: number of micro-batches that keep their graphs.
        repeats: whether the loader can read micro-batches a second time.
        reserved: host bytes per rank that are needed later.

    Raises:
        ValueError: the cache exceeds the host's free memory, or is too small for a loader that cannot repeat.
    """
    config, batch = spec.flags, spec.batch
    image_size = model.cfg.vision_cfg.image_size
    rows = batch.micro_batch_size // parallel.tp_size
    images = (rows, 3, image_size, image_size)
    replays_pixels = not model.frozen["image"]
    micro_batch_bytes = 3 * image_size**2 * rows
    replayed = batch.num_micro_batches - min(resident, batch.num_micro_batches) if replays_pixels else 0
    on_gpu = config.pixel_cache_gb == "gpu"
    ranks = ranks_of_host(parallel)
    free = available_host_bytes() - ranks * reserved
    kept = replayed
    if not on_gpu:
        automatic = config.pixel_cache_gb == "auto"
        budget = auto_budget(free, ranks) if automatic else float(config.pixel_cache_gb) * 1e9
        kept = min(replayed, int(budget // micro_batch_bytes))
    kept = int(-max_over(parallel.dp_group, [-kept], parallel.device)[0])
    if not on_gpu and kept and kept * micro_batch_bytes * ranks > free:
        raise ValueError(
            f"--pixel-cache-gb {config.pixel_cache_gb}: {ranks} ranks x {kept * micro_batch_bytes / 1e9:.2f} GB are "
            f"more than the {free / 1e9:.1f} GB of host memory that are free next to a checkpoint's copy; auto takes "
            "what fits"
        )
    if kept < replayed and not repeats:
        raise ValueError(
            f"the streaming reader cannot read a step twice, and its pixels ({replayed * micro_batch_bytes / 1e9:.2f} "
            f"GB a rank) do not fit in --pixel-cache-gb {config.pixel_cache_gb}: use --dataset-type webdataset, or more"
        )
    return PixelCache(
        parallel.device,
        images,
        num_micro_batches=batch.num_micro_batches,
        resident=resident,
        kept=kept,
        replays_pixels=replays_pixels,
        on_gpu=on_gpu,
        parts=parallel.tp_size,
        texts=texts_of_part(model.cfg.text_cfg, parallel, pack=spec.packs_captions),
        join=partial(join_parts, parallel),
    )


def describe_pixels(cache: PixelCache) -> str:
    """Return one line on where pixels are kept, and on the memory and decoding this costs."""
    total, kept, again = cache.num_micro_batches, len(cache.kept), len(cache.again)
    bytes_per_sample = cache.image_bytes
    where = "GPU" if cache.kept.is_cuda else "host"
    text = f"{bytes_per_sample:,} bytes per sample, {total * cache.micro_batch_size:,} samples per rank"
    if kept + again == 0:
        return text
    text += f"; between the passes {kept} of {kept + again} micro-batches wait in {cache.kept.numel() / 1e9:.2f} GB of "
    text += f"{where} memory"
    return text + (f", {again} are read and decoded twice ({1 + again / total:.2f}x the decoding)" if again else "")


def auto_budget(free: float, ranks: int) -> float:
    """Return the bytes per rank of --pixel-cache-gb auto, for `free` bytes on a host with `ranks` ranks."""
    return _SHARE * max(0.0, free) / ranks


def texts_of_part(
    text_cfg: TextConfig | TextInput, parallel: Parallel, *, pack: bool
) -> Callable[[torch.Tensor], Texts]:
    """Return a function that joins the captions of all tensor-parallel ranks into text inputs of CLIP's forward.

    The function takes this rank's part of a micro-batch, int64 [m / T, L] on the host. It is collective over the
    tensor-parallel ranks. Padded captions are joined on the device, like pixels. Captions to be packed are joined on
    the host, where each rank packs all of them into the same rows.
    """
    as_taken = texts_for_model(text_cfg, pack=pack)
    if pack:
        return lambda part: as_taken(join_parts(parallel, part))
    return lambda part: as_taken(join_parts(parallel, part.to(parallel.device, non_blocking=True)))
