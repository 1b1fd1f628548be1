"""The optimizer that --opt selects: its parameter groups, and the memory of its state.

Weight decay applies to the weights of linear and convolutional layers, projections and token embeddings. Everything
else is excluded: norms, biases, position, type and class embeddings, latents of attention pools, layer scales,
logit_scale and logit_bias. The rule lists what decays, so that it holds for the towers of timm and Hugging Face too.

Besides torch's keys, a group has `lr_scale`, the factor between the schedule's learning rate and its own.
"""

import re
from typing import Any

import torch
from torch import nn

from infcl.config import RunSpec, TrainConfig
from infcl.config.preset import sums_gradients_on_host
from infcl.engine.optimizers import AdaFactor, AdamW, AdamW8bit, Lamb, Lion, factored_dims
from infcl.engine.schedule import batch_size_factor

_DECAYED = ("weight", "proj", "text_projection", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_NORM = re.compile(r"norm\w{0,6}$", re.IGNORECASE)  # of a class: LayerNorm, RMSNorm, BatchNorm2d, LayerNormFp32
_TABLE = re.compile(r"posi|wpe|rel_|relative|token_type")  # modules of type nn.Embedding that hold no tokens
ALIGNED = 8  # elements: 16 bytes in bf16


def decays(name: str, owner: nn.Module) -> bool:
    """Return whether weight decay applies to the parameter `name` of the module `owner`."""
    module, _, parameter = name.rpartition(".")
    if parameter not in _DECAYED or _NORM.search(type(owner).__name__):
        return False
    return not (isinstance(owner, nn.Embedding) and _TABLE.search(module.rpartition(".")[2]))


def tower(name: str) -> str:
    """Return the tower of a parameter: "image", "text", or "scalars" for logit_scale and logit_bias."""
    return "image" if name.startswith("visual.") else "scalars" if name.startswith("logit_") else "text"


def parameter_groups(model: Any, config: TrainConfig, peak: float) -> list[dict]:
    """Group the trainable parameters of a model, or of this rank's part of it, by weight decay and learning rate.

    Groups with weight decay come first. A group has the model's order, except that parameters of odd sizes come last.
    `peak` is the largest learning rate of the schedule.

    Raises:
        ValueError: layer decay is set for a tower without blocks.
    """
    owners = {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    depths = {part: _blocks(model, part) for part in ("image", "text")}
    for part, depth in depths.items():
        if depth == 0 and getattr(config, f"{part}_layer_decay") is not None:
            raise ValueError(
                f"--{part}-layer-decay: the {part} tower of {config.model} has no blocks transformer.resblocks.N"
            )
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = _lr_scale(config, name, depths)
        factored = config.opt == "adafactor" and factored_dims(parameter.shape) is not None
        decay = config.wd if parameter.ndim > 1 and decays(name, owners[name]) else 0.0
        group: dict[str, Any] = {"params": [], "weight_decay": decay, "lr": peak * scale, "lr_scale": scale}
        groups.setdefault((decay == 0, -scale, factored), group)["params"].append(parameter)
    for group in groups.values():
        # ZeRO concatenates a group's parameters. After one of odd size (logit_scale) no tensor would start at a
        # multiple of 16 bytes, which the kernels of compiled blocks require (CUDA: misaligned address).
        group["params"].sort(key=lambda parameter: parameter.numel() % ALIGNED != 0)
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    model: nn.Module, config: TrainConfig, *, global_batch_size: int, fused: bool
) -> torch.optim.Optimizer:
    """Build the optimizer of --opt over `parameter_groups`. `fused` selects the fused kernel of AdamW."""
    peak = config.lr * batch_size_factor(config, global_batch_size)
    groups, betas = parameter_groups(model, config, peak), (config.beta1, config.beta2)
    if config.opt == "adamw":
        return AdamW(groups, lr=peak, betas=betas, eps=config.eps, fused=fused)
    if config.opt == "adamw8bit":
        return AdamW8bit(groups, lr=peak, betas=betas, eps=config.eps)
    if config.opt == "lion":
        return Lion(groups, lr=peak, betas=betas)
    if config.opt == "lamb":
        return Lamb(groups, lr=peak, betas=betas, eps=config.eps)
    return AdaFactor(groups, lr=peak, momentum=config.beta1, beta2_cap=config.beta2)


def state_bytes_per_element(config: TrainConfig) -> int:
    """Return bytes per trained element in addition to its FP32 master weight: optimizer state and weight average."""
    of_optimizer = {"adamw": 8, "adamw8bit": 2, "lion": 4, "lamb": 8, "adafactor": 2}[config.opt]
    return of_optimizer + (4 if config.ema_decay is not None else 0)


def checkpoint_bytes(config: TrainConfig, parameters: int, trainable: int) -> int:
    """Return the bytes of a checkpoint: FP32 weights, optimizer states of a parameter's size, and the average."""
    states = {"adamw": 2, "adamw8bit": 2, "lion": 1, "lamb": 2, "adafactor": 1}[config.opt]
    return 4 * (parameters + trainable * (states + (config.ema_decay is not None)))


def later_host_bytes(spec: RunSpec, model: nn.Module) -> float:
    """Return the host bytes that a rank allocates during training: the checkpoint's copy, and ZeRO-2's sums."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    trainable = sum(size for size, is_trained in sizes if is_trained)
    sums = "optimizer" in spec.offloads and sums_gradients_on_host(spec.zero_stage, spec.precision)
    saved = checkpoint_bytes(spec.flags, sum(size for size, _ in sizes), trainable)
    return (saved + (4 * trainable if sums else 0)) / spec.ranks


def _lr_scale(config: TrainConfig, name: str, depths: dict[str, int]) -> float:
    """Return the parameter's learning rate divided by --lr.

    It is the tower's rate times layer decay ** distance from the tower's end. The distance is 0 for the head, 1 for the
    last block, ..., and number of blocks + 1 for the embeddings.
    """
    part = tower(name)
    if part == "scalars":
        return 1.0
    rate, layer_decay = getattr(config, f"{part}_lr"), getattr(config, f"{part}_layer_decay")
    scale = 1.0 if rate is None else rate / config.lr
    return scale if layer_decay is None else scale * layer_decay ** _from_the_end(name, depths[part])


_HEAD = ("visual.proj", "visual.ln_post", "text_projection", "ln_final")
_BLOCK = re.compile(r"transformer\.resblocks\.(\d+)\.")


def _from_the_end(name: str, blocks: int) -> int:
    if name.removeprefix("text.").startswith(_HEAD):
        return 0
    block = _BLOCK.search(name)
    return blocks - int(block[1]) if block else blocks + 1


def _blocks(model: nn.Module, part: str) -> int:
    """Return the number of residual blocks of a tower."""
    names = (name for name, _ in model.named_parameters() if tower(name) == part)
    return max((1 + int(block[1]) for name in names if (block := _BLOCK.search(name))), default=0)
