"""Parameter groups, the optimizer, and the learning rate as a pure function of the step.

Weight decay is for matrices. Norms, biases, position and class embeddings, logit_scale and logit_bias are excluded by
name, not by rank, so that the rule can be read off (and holds for flattened ZeRO partitions alike).
"""

import math

import torch
from torch import nn

from infcl.config import TrainConfig

_NO_DECAY_NAMES = ("positional_embedding", "class_embedding", "logit_scale", "logit_bias", "bias", "in_proj_bias")


def decays(name: str, owner: nn.Module) -> bool:
    """Whether the parameter `name`, which belongs to module `owner`, takes weight decay."""
    return name.rsplit(".", 1)[-1] not in _NO_DECAY_NAMES and not isinstance(owner, (nn.LayerNorm, nn.GroupNorm))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: with weight decay and without, each in the model's order."""
    owners = {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if decays(name, owners[name]) else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`. torch's own, since DeepSpeed's variants compile a kernel at start."""
    return torch.optim.AdamW(
        parameter_groups(model, config.wd),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def learning_rate(config: TrainConfig, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Learning rate of optimizer step `step` (from 0): open_clip's schedules. A pure function, so resume is exact."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.lr_scheduler == "cosine":
        progress = (step - config.warmup) / max(1, total_steps - config.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * config.lr
    if config.lr_scheduler == "const":
        return config.lr
    cooldown_steps = config.epochs_cooldown * steps_per_epoch
    into_cooldown = step - (total_steps - cooldown_steps)
    if into_cooldown < 0:
        return config.lr
    decay = (1 - into_cooldown / cooldown_steps) ** config.lr_cooldown_power
    return decay * (config.lr - config.lr_cooldown_end) + config.lr_cooldown_end
