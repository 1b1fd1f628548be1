"""An exponential moving average of the weights, sharded as ZeRO shards their fp32 masters.

    average <- average + (1 - d) (weight - average),  d = min(decay, (1 + n) / (10 + n)) at update n = 0, 1, ...

The decay is small at first, so that the average forgets the initial weights (as TensorFlow's ExponentialMovingAverage
with num_updates). Every rank averages the elements it owns: 4 bytes an element, no communication.
"""

import torch


class WeightAverage:
    """fp32 averages of `weights`, the tensors that the optimizer updates, each beside its weight (offload included)."""

    def __init__(self, weights: list[torch.Tensor], decay: float):
        self.weights, self.decay = weights, decay
        self.updates = 0
        self.averages = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; once per optimizer step that was not skipped."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(self.averages, [weight.detach() for weight in self.weights], 1 - decay)

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The average of one of the `weights`, a tensor of its shape."""
        return next(average for own, average in zip(self.weights, self.averages) if own is weight)
