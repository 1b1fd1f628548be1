"""Pixel cache: keep a step's pixels between the two passes, in one buffer in pinned host memory or on the GPU.

The cache keeps the pixels of the first K of the micro-batches that pass 2 encodes again. The loader reads the others
again, with the same augmentation, while the loss and the replays of the kept ones run. The second reading may differ (a
file changed, or a read failed and a replacement was drawn). The cache therefore compares checksums of both passes, and
a difference stops the step before its update.

The results are bitwise independent of K: the computations and their order are the same.

A separate stream copies host pixels to the device into a few alternating slots, while the previous micro-batch is
computed. Pixels take 3 S^2 bytes per sample (150,528 at 224 px).
"""

import weakref

import torch

_MULTIPLIER = -7046029254386353131  # odd, bits well mixed (2^64 / golden ratio, as int64)
UPLOAD_LEAD = 2  # a copy may overlap the work enqueued since this many calls ago


class PixelCache:
    """Pixels of one step's micro-batches, by index.

    Args:
        device: where the micro-batches are computed.
        images: shape of a micro-batch's pixels on this rank, (rows, 3, S, S).
        replayed: micro-batches whose pixels pass 2 needs, the first ones of the step.
        kept: K.
        on_gpu: keep pixels on the GPU instead of in pinned host memory.

    Attributes:
        again: indices of the micro-batches that the loader reads twice.
    """

    def __init__(
        self,
        device: torch.device,
        images: tuple[int, int, int, int],
        *,
        replayed: int,
        kept: int,
        on_gpu: bool = False,
    ):
        self.again = range(min(kept, replayed), replayed)
        self.kept = _buffer((self.again.start, *images), device if on_gpu else None)
        self._upload = _Upload(device, images)
        self.begin()

    def begin(self) -> None:
        """Discard the previous step."""
        self._upload.finish()
        self._checksums: dict[int, torch.Tensor] = {}
        self._differs: dict[int, torch.Tensor] = {}

    def first(self, index: int, images: torch.Tensor) -> torch.Tensor:
        """Return the pixels of pass 1 on the device, and keep or check-sum them. Enqueue their use before the next."""
        if index < len(self.kept):
            self.kept[index].copy_(images, non_blocking=self.kept.is_cuda)
            images = self.kept[index]
        images = self._upload(images)
        if index in self.again:
            self._checksums[index] = checksum(images)
        return images

    def second(self, index: int, images: torch.Tensor | None = None) -> torch.Tensor:
        """Return the pixels of pass 2 on the device: the kept ones, or `images` from the second reading."""
        if images is None:
            return self._upload(self.kept[index])
        images = self._upload(images)
        self._differs[index] = checksum(images) != self._checksums[index]
        return images

    def first_changed(self) -> int | None:
        """Return the first micro-batch whose second reading had other pixels. Waits for the device if there was one."""
        return next((index for index, differs in self._differs.items() if differs), None)


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
