"""Pixel cache: keep a step's pixels between the two passes, or read and decode them a second time.

In:  a step's micro-batches from the loader, {"images" uint8 [m, 3, S, S], "texts", "ids"} on the host.
Out: the micro-batches on the device, by index, in the access order of grad_cache_step:
     0 ... M - 1 (pass 1), then 0 ... M - R - 1 (pass 2; the last R have kept their graphs).

Features, tokens and sample numbers always stay in memory; the pixels of millions of samples may not fit. The cache
keeps the pixels of the first K micro-batches in one buffer, in pinned host memory or on the GPU. The loader yields
micro-batches K ... M - R - 1 again after the step's M. It decodes them again with the same augmentation, while the loss
and the replays of the kept ones run. The second reading may differ (a file changed, or a read failed and a replacement
was drawn). The cache therefore compares checksums of both passes, and a difference stops the step before its update.

The results are bitwise independent of K: the computations and their order are the same.

A separate stream copies host pixels to the device into a few alternating slots, while the previous micro-batch is
computed. Pixels take 3 S^2 bytes per sample (150,528 at 224 px).
"""

import time
import weakref
from collections.abc import Callable, Iterator

import torch

MicroBatch = dict[str, torch.Tensor]
_MULTIPLIER = -7046029254386353131  # odd, bits well mixed (2^64 / golden ratio, as int64)
UPLOAD_LEAD = 2  # a copy may overlap the work enqueued since this many calls ago


class PixelCache:
    """Sequence of one step's micro-batches on the device.

    `begin(items)` starts each step; `items` yields the M micro-batches, then those of `again`. Leaving the cache as a
    context releases the loader.

    Args:
        device: where the micro-batches are computed.
        images: shape of a micro-batch's pixels on this rank, (rows, 3, S, S).
        num_micro_batches, resident, kept: M, R, K.
        replays_pixels: whether pass 2 needs pixels. False with a locked image tower: pass 2 then gets images None.
        on_gpu: keep pixels on the GPU instead of in pinned host memory.
        parts: number of ranks that share a micro-batch; each reads one part of it.
        texts: this part's texts from the loader -> the texts of all parts, {name: tensor}, as inputs of the model.
        join: this part's pixels on the device -> the pixels of all parts. Only this part is kept and uploaded.
    """

    def __init__(
        self,
        device: torch.device,
        images: tuple[int, int, int, int],
        *,
        num_micro_batches: int,
        resident: int,
        kept: int,
        replays_pixels: bool = True,
        on_gpu: bool = False,
        parts: int = 1,
        texts: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda texts: {"texts": texts},
        join: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    ):
        self.device, self.num_micro_batches = device, num_micro_batches
        self.parts, self.texts, self.join = parts, texts, join
        self.micro_batch_size, self.image_bytes = images[0], images[1] * images[2] * images[3]
        replayed = max(0, num_micro_batches - max(1, resident)) if replays_pixels else 0
        self.again = range(min(kept, replayed), replayed)
        self.kept = _buffer((self.again.start, *images), device if on_gpu else None)
        self.copies = _Upload(device, images)

    def begin(self, items: Iterator[MicroBatch]) -> None:
        """Discard the previous step and wait for the first micro-batch of this one."""
        self.copies.finish()
        self.items = items
        self.tokens: list[dict[str, torch.Tensor]] = []
        self.positions = [0, 0]  # token positions of this step's texts: computed, total
        self.ids: list[torch.Tensor] = []
        self.same_ids: list[torch.Tensor] = []
        self.checksums: dict[int, torch.Tensor] = {}
        self.differs: dict[int, torch.Tensor] = {}
        self.waited = 0.0  # seconds of this step that the host waited for its loader or for other parts' loaders
        self.waited_for_parts = 0.0  # of which for other parts
        self.waited_again = 0.0  # of which in the second reading
        self.first: MicroBatch | None = self._next()

    def __enter__(self) -> "PixelCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.items, self.first = iter(()), None

    def __len__(self) -> int:
        return self.num_micro_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | None]:
        """Return micro-batch `index` on the device. Enqueue its use before you access another one."""
        if index == len(self.tokens):
            images = self._read_first(index)
        elif index in self.again:
            images = self._read_again(index)
        elif index >= len(self.kept):
            images = None
        else:
            images = self.copies(self.kept[index])
        return {"images": None if images is None else self.join(images), **self.tokens[index]}

    @property
    def waited_for_data(self) -> float:
        """Seconds of this step that the host waited for its own loader."""
        return self.waited - self.waited_for_parts

    @property
    def text_share(self) -> float:
        """Share of the texts' token positions that the text tower computes in a step."""
        return self.positions[0] / self.positions[1]

    def check(self) -> None:
        """Raise RuntimeError if the second reading had different pixels. Waits for the device if there was one."""
        for index, differs in self.differs.items():
            if differs:
                raise RuntimeError(
                    f"micro-batch {index} (samples {self._shown(index)}) had other pixels when it was read for the "
                    "second pass: a file changed or a read failed between; --pixel-cache-gb can keep them instead"
                )

    def _read_first(self, index: int) -> torch.Tensor:
        batch, self.first = self.first or self._next(), None
        self.ids.append(batch["ids"].clone())
        if "same_ids" in batch:
            self.same_ids.append(batch["same_ids"].clone())
        if index < len(self.kept):
            self.kept[index].copy_(batch["images"], non_blocking=self.kept.is_cuda)
            images = self.copies(self.kept[index])
        else:
            images = self.copies(batch["images"])
        if index in self.again:
            self.checksums[index] = checksum(images)
        self._take_texts(batch["texts"])
        return images

    def _take_texts(self, part: torch.Tensor) -> None:
        started = time.perf_counter()
        texts = self.texts(part)
        if self.parts > 1:  # self.texts waited for the ranks that read the other parts
            seconds = time.perf_counter() - started
            self.waited, self.waited_for_parts = self.waited + seconds, self.waited_for_parts + seconds
        self.positions[0] += texts["texts"].numel()
        self.positions[1] += self.parts * part.numel()
        self.tokens.append({name: value.to(self.device, non_blocking=True) for name, value in texts.items()})

    def _read_again(self, index: int) -> torch.Tensor:
        before = self.waited
        batch = self._next()
        self.waited_again += self.waited - before
        if not torch.equal(batch["ids"], self.ids[index]):
            raise RuntimeError(
                f"micro-batch {index} had samples {self._shown(index)} and has {batch['ids'][:8].tolist()} when it is "
                "read for the second pass: a read failed and a replacement was drawn"
            )
        images = self.copies(batch["images"])
        self.differs[index] = checksum(images) != self.checksums[index]
        return images

    def _shown(self, index: int) -> str:
        numbers = self.ids[index].tolist()
        return f"{', '.join(map(str, numbers[:4]))}, ..." if len(numbers) > 4 else ", ".join(map(str, numbers))

    def _next(self) -> MicroBatch:
        started = time.perf_counter()
        batch = next(self.items)
        self.waited += time.perf_counter() - started
        return batch


class _Upload:
    """Upload of host pixels, ahead of the computation. On a CPU, and for pixels on the device, it returns its input."""

    def __init__(self, device: torch.device, images: tuple[int, int, int, int]):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.slots = [torch.empty(images, dtype=torch.uint8, device=device) for _ in range(1 + UPLOAD_LEAD)]
            self.enqueued = [torch.cuda.Event() for _ in self.slots]  # work enqueued before a call
            self.done, self.calls = torch.cuda.Event(), 0

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        if self.stream is None or host.is_cuda:
            return host
        index, oldest = self.calls % len(self.slots), (self.calls + 1) % len(self.slots)
        compute, slot = torch.cuda.current_stream(), self.slots[index]
        self.enqueued[index].record(compute)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.enqueued[oldest])  # UPLOAD_LEAD calls ago
            slot.copy_(host, non_blocking=True)
            self.done.record(self.stream)
        compute.wait_event(self.done)
        self.calls += 1
        return slot

    def finish(self) -> None:
        """Wait until the host buffers of all copies may be written again."""
        if self.stream is not None:
            self.stream.synchronize()


@torch.no_grad()
def checksum(images: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a uint8 tensor, [] int64: the sum of its 8-byte words times odd factors, modulo 2^64.

    The factor depends on the word's position. A change of any single word changes the sum. Computed on the tensor's
    device; the host does not wait.
    """
    data = images.reshape(-1)
    words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    factors = torch.arange(len(words), device=words.device) * _MULTIPLIER | 1
    return (words * factors).sum()


def _buffer(shape: tuple[int, ...], device: torch.device | None) -> torch.Tensor:
    """Return a uint8 buffer; device None means host memory, pinned if a GPU exists.

    Pinned here, because torch's allocator of pinned memory rounds up to powers of 2.
    """
    tensor = torch.empty(shape, dtype=torch.uint8, device=device or "cpu")
    if device is None and torch.cuda.is_available() and tensor.numel():
        status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(
                f"{tensor.numel() / 1e9:.1f} GB of host memory could not be pinned for pixels (CUDA error {status}): "
                "use a smaller --pixel-cache-gb, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(tensor.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, tensor.data_ptr())
    return tensor
