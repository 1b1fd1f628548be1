"""A trainer whose steps compute the towers for a few micro-batches only, to find how much memory a huge batch takes.

Everything that grows with the batch is there and as large as ever: pixels between the passes, tokens, features, the
loss of all pairs over all ranks, feature gradients. Micro-batches between the first and the last `real` of a pass get
random unit vectors for features and no backward, which would need no memory beyond that of the others, only hours.
"""

import torch
import torch.nn.functional as F

from benchmarks.reused import ReusedTrainer
from infcl.models.packing import num_texts
from infcl.train.observers import Step


class AbridgedTrainer(ReusedTrainer):
    real = 2  # micro-batches at each end of a pass that are encoded

    def train_step(self, micro_batches) -> Step:
        self.encoded = 0
        return super().train_step(micro_batches)

    def _backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        self.replaying = True
        if surrogate.requires_grad:
            super()._backward(surrogate, is_last)

    def _encode(self, micro_batch: dict) -> dict:
        index, self.encoded = self.encoded, self.encoded + 1
        return super()._encode(micro_batch) if self._is_real(index) else self._stand_in(micro_batch)

    def _encode_again(self, micro_batch: dict, kept: dict, first: int) -> dict:
        if self._is_real(first // self.batch.micro_batch_size):
            return super()._encode_again(micro_batch, kept, first)
        return self._stand_in(micro_batch)

    def _is_real(self, index: int) -> bool:
        """The resident ones keep their graphs; before them, the last one that is replayed ends the step."""
        cached = self.batch.num_micro_batches - max(1, self.resident)
        return index < self.real or index >= cached - self.real

    def _stand_in(self, micro_batch: dict) -> dict[str, torch.Tensor]:
        device, shape = self.parallel.device, (num_texts(micro_batch), self.model_config.embed_dim)
        features = {
            name: F.normalize(torch.randn(shape, device=device), dim=1) for name in ("image_features", "text_features")
        }
        scalars = {"logit_scale": 2.659, "logit_bias": self.model_config.init_logit_bias}
        return features | {
            n: torch.full([1], value, device=device) for n, value in scalars.items() if value is not None
        }
