"""Memory and time plan of the paper's trainer (Inf-CLIP, arXiv 2410.17243), to check the planner against its tables.

The paper's trainer differs from infcl: DDP with full Adam state and gradient buckets, autocast to FP16 with weight
copies, and no activation checkpointing. A step's pixels are FP32 on the GPU unless "data offload" is on. Dense losses
are FP32, with two logit matrices and their gradients (16 bytes per logit) and four gathered feature matrices. The peak
is Equation 10: states, data and features, plus the larger of the towers' graph and the loss.

Three constants are fitted to cells of Table 1. A block keeps 40 bytes per token and width (8 GPUs, 32k, offload). There
are 10 copies of a rank's features (8 GPUs, 256k compared with 32k). The tiled loss holds 16 copies (8 GPUs, 1024k
compared with 256k, offload).
"""

from infcl.models.config import load_model_config
from infcl.plan.memory import activation_bytes, block_bytes
from infcl.plan.profile import load_gpu
from infcl.plan.setting import Setting, parameters_of
from infcl.plan.timing import step_seconds

_BYTES_PER_TOKEN = 40
_FEATURE_COPIES = 10
_TILED_COPIES = 16


def paper_memory(setting: Setting) -> dict[str, float]:
    """Return {part: bytes per GPU}, with "loss" and "peak" as in the paper's tables.

    setting.pixels "host" is the paper's data offload, "device" is without it.
    """
    model, rows, batch = setting.model, setting.rank_batch, setting.global_batch
    parameters = parameters_of(model)
    block = rows * model.embed_dim * 4.0
    gathered = 4.0 * batch * model.embed_dim * 4
    loss = {"clip": 16.0 * batch * batch + gathered, "open_clip": 16.0 * rows * batch + gathered}
    graph = activation_bytes(setting.with_(compiled=False))
    parts = {
        "parameters": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "optimizer": 8.0 * parameters,
        "gradient buckets": 4.0 * parameters,
        "cached data": rows * (4.0 * 3 * model.vision_cfg.image_size**2 + 8 * model.text_cfg.context_length),
        "features": _FEATURE_COPIES * block,
        "activations": graph * _BYTES_PER_TOKEN / block_bytes(setting.precision) + 2.0 * parameters,
        "loss": loss.get(setting.loss, _TILED_COPIES * block),
    }
    if setting.pixels == "host":
        parts["cached data"] = setting.micro_batch * parts["cached data"] / rows
    lasting = sum(parts.values()) - parts["activations"] - parts["loss"] - parts["features"]
    parts["peak"] = lasting + max(parts["activations"] + parts["features"], parts["loss"])
    return parts


def paper_step(model: str, gpus: int, global_batch: int) -> float:
    """Return planned seconds per step of the paper's trainer on A800s: eager blocks, autocast, torch's attention."""
    return step_seconds(
        Setting(
            model=load_model_config(model),
            gpu=load_gpu("a800-80g"),
            gpus=gpus,
            global_batch=global_batch,
            micro_batch=128,
            compiled=False,
            attention="torch",
        )  # fmt: skip
    )
