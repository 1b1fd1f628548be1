"""The learning-rate schedule, a pure function of the step."""

import math

from infcl.config import TrainConfig, counted

MOST_WARMUP = 10_000  # steps, where no flag gives them; open_clip's default
_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def batch_size_factor(config: TrainConfig, global_batch_size: int) -> float:
    """Return the factor of --lr-scaling, by which all learning rates are multiplied."""
    rule, base = config.lr_scaling_and_base
    return (global_batch_size / base) ** _EXPONENTS[rule]


class Schedule:
    """Learning-rate schedule: schedule(step) returns the learning rate of optimizer step `step`, from 0.

    The curves are open_clip's, scaled by --lr-scaling. The result depends on the step alone, so a resume is exact.

    Attributes:
        peak: the largest learning rate.
        warmup: number of warm-up steps.
    """

    def __init__(self, config: TrainConfig, *, global_batch_size: int, total_steps: int, steps_per_epoch: int):
        self.config, self.total_steps = config, total_steps
        self.global_batch_size = global_batch_size
        self.factor = batch_size_factor(config, global_batch_size)
        self.peak = config.lr * self.factor
        self.warmup = min(MOST_WARMUP, total_steps // 10) if config.warmup is None else config.warmup
        self.cooldown_steps = (config.epochs_cooldown or 0) * steps_per_epoch

    def __call__(self, step: int) -> float:
        return self.factor * self._unscaled(step)

    def oddity(self) -> str | None:
        """Return a warning if the warm-up takes over a third of the run or overlaps with the cooldown, else None."""
        steps, warmup, cooldown = self.total_steps, self.warmup, self.cooldown_steps
        if warmup <= steps / 3 and warmup <= steps - cooldown:
            return None
        also = f" and the cooldown {cooldown}" if cooldown else ""
        return (
            f"the warm-up takes {warmup} of {counted(steps, 'step')}{also}; lr ends at {self(steps - 1):.2g} of "
            f"{self.peak:.2g} (--warmup, --epochs-cooldown)"
        )

    def describe_warmup(self) -> str:
        """Return the peak and the warm-up's share: "peak 0.0005 after 80 warm-up steps (9.9% of the run)"."""
        share = 100 * self.warmup / self.total_steps
        return f"peak {self.peak:.3g} after {counted(self.warmup, 'warm-up step')} ({share:.3g}% of the run)"

    def tower_rates(self, step: int) -> dict[str, float]:
        """Return {"lr_image": ..., "lr_text": ...} for the towers with their own learning rate."""
        given = {"lr_image": self.config.image_lr, "lr_text": self.config.text_lr}
        return {name: self(step) * rate / self.config.lr for name, rate in given.items() if rate is not None}

    def __str__(self) -> str:
        config = self.config
        rates = {"": config.lr, "image tower ": config.image_lr, "text tower ": config.text_lr}
        rates["at the end "] = config.lr_cooldown_end if config.lr_scheduler == "const-cooldown" else None
        given = {name: rate for name, rate in rates.items() if rate is not None}
        if config.lr_scaling == "none":
            return ", ".join(f"{name}{rate:.3g}" for name, rate in given.items())
        scaled = ", ".join(f"{name}{rate:.3g} -> {rate * self.factor:.3g}" for name, rate in given.items())
        rule, base = config.lr_scaling_and_base
        return f"{scaled} ({rule}: batch {self.global_batch_size} / {base}, x {self.factor:.3g})"

    def _unscaled(self, step: int) -> float:
        config, total_steps = self.config, self.total_steps
        if step < self.warmup:
            return config.lr * (step + 1) / self.warmup
        if config.lr_scheduler == "cosine":
            progress = (step - self.warmup) / max(1, total_steps - self.warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * config.lr
        if config.lr_scheduler == "const":
            return config.lr
        into_cooldown = step - (total_steps - self.cooldown_steps)
        if into_cooldown < 0:
            return config.lr
        decay = (1 - into_cooldown / self.cooldown_steps) ** config.lr_cooldown_power
        return decay * (config.lr - config.lr_cooldown_end) + config.lr_cooldown_end
