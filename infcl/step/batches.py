"""Micro-batches of a step: captions, sample numbers and pixels, read once or twice.

In:  a step's micro-batches from the loader, {"images" uint8 [m, 3, S, S], "texts", "ids"} on the host.
Out: inputs of the model on the device, by index, in the access order of cached_step:
     0 ... M - 1 (pass 1), then 0 ... M - R - 1 (pass 2; the last R have kept their graphs).

Features, tokens and sample numbers always stay in memory; the pixels of millions of samples may not fit (pixels.py).
The loader yields the micro-batches that it reads again after the step's M.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from infcl.config import RunSpec
from infcl.models.clip import CLIP
from infcl.models.config import TextConfig
from infcl.models.open_clip_config import TextInput
from infcl.models.packing import Texts, texts_for_model
from infcl.parallel import Parallel, join_parts, max_over, ranks_of_host
from infcl.parallel.host_limits import available_host_bytes
from infcl.step.pixels import PixelCache

MicroBatch = dict[str, torch.Tensor]
_SHARE = 0.6  # of the free host memory, for `auto`; workers and page cache need the rest


class StepBatches:
    """Sequence of one step's micro-batches on the device.

    `begin(items)` starts each step; `items` yields the M micro-batches, then those of `pixels.again`. Leaving the
    sequence as a context releases the loader.

    Args:
        pixels: caches the pixels between the passes.
        num_micro_batches: M.
        frozen: {"image", "text"}: towers that pass 2 does not encode; micro-batches then lack their inputs.
        parts: number of ranks that share a micro-batch; each reads one part of it.
        device: where the micro-batches are computed.
        texts: this part's texts from the loader -> the texts of all parts, {name: tensor}, as inputs of the model.
        join: this part's pixels on the device -> the pixels of all parts. Only this part is kept and uploaded.
        teacher: this part's pixels on the device, and the micro-batch -> a teacher's image and text embeddings of all
            parts. It is called once for each micro-batch.

    Attributes:
        teacher: embeddings of each micro-batch read so far, on the device.
        ids, same_ids: of each micro-batch read so far, on the host.
        waited: seconds of this step that the host waited for its loader or for other parts' loaders.
        waited_again: of which in the second reading.
    """

    def __init__(
        self,
        pixels: PixelCache,
        num_micro_batches: int,
        *,
        device: torch.device,
        frozen: Mapping[str, bool] | None = None,
        parts: int = 1,
        texts: Callable[[torch.Tensor], Texts] = lambda texts: {"texts": texts},
        join: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
        teacher: Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, ...]] | None = None,
    ):
        self.pixels, self.num_micro_batches, self.device = pixels, num_micro_batches, device
        self.frozen = frozen or {"image": False, "text": False}
        self._parts, self._texts_of, self._join = parts, texts, join
        self._embeddings_of = teacher

    def begin(self, items: Iterator[MicroBatch]) -> None:
        """Discard the previous step and wait for the first micro-batch of this one."""
        self.pixels.begin()
        self._items = items
        self._texts: list[Texts] = []
        self._positions = [0, 0]  # token positions of this step's texts: computed, total
        self.ids: list[torch.Tensor] = []
        self.same_ids: list[torch.Tensor] = []
        self.teacher: list[tuple[torch.Tensor, ...]] = []
        self.waited = self.waited_again = self._waited_for_parts = 0.0
        self._first: MicroBatch | None = self._next()

    def __enter__(self) -> "StepBatches":
        return self

    def __exit__(self, *_: object) -> None:
        self._items, self._first = iter(()), None

    def __len__(self) -> int:
        return self.num_micro_batches

    def __getitem__(self, index: int) -> MicroBatch:
        """Return micro-batch `index` on the device. Enqueue its use before you access another one."""
        if index == len(self._texts):
            return {"images": self._join(self._read(index)), **self._texts[index]}
        inputs = {} if self.frozen["text"] else dict(self._texts[index])
        if not self.frozen["image"]:
            again = self._read_again(index) if index in self.pixels.again else None
            inputs["images"] = self._join(self.pixels.second(index, again))
        return inputs

    @property
    def waited_for_data(self) -> float:
        """Seconds of this step that the host waited for its own loader."""
        return self.waited - self._waited_for_parts

    @property
    def text_share(self) -> float:
        """Share of the texts' token positions that the text tower computes in a step."""
        return self._positions[0] / self._positions[1]

    def check(self) -> None:
        """Raise RuntimeError if the second reading had different pixels. Waits for the device if there was one."""
        if (index := self.pixels.first_changed()) is not None:
            raise RuntimeError(
                f"micro-batch {index} (samples {self._shown(index)}) had other pixels when it was read for the second "
                "pass: a file changed or a read failed between; --pixel-cache-gb can keep them instead"
            )

    def _read(self, index: int) -> torch.Tensor:
        batch, self._first = self._first or self._next(), None
        self.ids.append(batch["ids"].clone())
        if "same_ids" in batch:
            self.same_ids.append(batch["same_ids"].clone())
        images = self.pixels.first(index, batch["images"])
        if self._embeddings_of is not None:
            self.teacher.append(self._embeddings_of(images, batch))
        self._take_texts(batch["texts"])
        return images

    def _take_texts(self, part: torch.Tensor) -> None:
        started = time.perf_counter()
        texts = self._texts_of(part)
        if self._parts > 1:  # it waited for the ranks that read the other parts
            seconds = time.perf_counter() - started
            self.waited, self._waited_for_parts = self.waited + seconds, self._waited_for_parts + seconds
        self._positions[0] += texts["texts"].numel()
        self._positions[1] += self._parts * part.numel()
        self._texts.append({name: value.to(self.device, non_blocking=True) for name, value in texts.items()})

    def _read_again(self, index: int) -> torch.Tensor:
        before = self.waited
        batch = self._next()
        self.waited_again += self.waited - before
        if not torch.equal(batch["ids"], self.ids[index]):
            raise RuntimeError(
                f"micro-batch {index} had samples {self._shown(index)} and has {batch['ids'][:8].tolist()} when it is "
                "read for the second pass: a read failed and a replacement was drawn"
            )
        return batch["images"]

    def _shown(self, index: int) -> str:
        numbers = self.ids[index].tolist()
        return f"{', '.join(map(str, numbers[:4]))}, ..." if len(numbers) > 4 else ", ".join(map(str, numbers))

    def _next(self) -> MicroBatch:
        started = time.perf_counter()
        batch = next(self._items)
        self.waited += time.perf_counter() - started
        return batch


def build_step_batches(
    spec: RunSpec,
    model: CLIP,
    parallel: Parallel,
    *,
    resident: int,
    repeats: bool,
    reserved: float,
    teacher: Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, ...]] | None = None,
) -> StepBatches:
    """Build the micro-batches of a run's steps, with the pixel cache that the flags select.

    Args:
        resident: number of micro-batches that keep their graphs.
        repeats: whether the loader can read micro-batches a second time.
        reserved: host bytes per rank that are needed later.
        teacher: see StepBatches.

    Raises:
        ValueError: the cache exceeds the host's free memory, or is too small for a loader that cannot repeat.
    """
    config, batch = spec.flags, spec.batch
    rows, side = batch.micro_batch_size // parallel.tp_size, model.cfg.vision_cfg.image_size
    replayed = 0 if model.frozen["image"] else max(0, batch.num_micro_batches - max(1, resident))
    micro_batch_bytes = 3 * side**2 * rows
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
    return StepBatches(
        PixelCache(parallel.device, (rows, 3, side, side), replayed=replayed, kept=kept, on_gpu=on_gpu),
        batch.num_micro_batches,
        device=parallel.device,
        frozen=model.frozen,
        parts=parallel.tp_size,
        texts=texts_of_part(model.cfg.text_cfg, parallel, pack=spec.packs_captions),
        join=partial(join_parts, parallel),
        teacher=teacher,
    )


def describe_pixels(batches: StepBatches) -> str:
    """Return one line on where pixels are kept, and on the memory and decoding this costs."""
    pixels, total = batches.pixels, batches.num_micro_batches
    rows, *sample = pixels.kept.shape[1:]
    text = f"{math.prod(sample):,} bytes per sample, {total * rows:,} samples per rank"
    kept, again = len(pixels.kept), len(pixels.again)
    if kept + again == 0:
        return text
    where = f"{pixels.kept.numel() / 1e9:.2f} GB of {'GPU' if pixels.kept.is_cuda else 'host'} memory"
    text += f"; between the passes {kept} of {kept + again} micro-batches wait in {where}"
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
