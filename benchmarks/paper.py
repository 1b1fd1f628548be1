"""The trainer of the paper (Inf-CLIP, arXiv 2410.17243) as planned, to check the planner against its tables.

It differs from ours: DDP with whole Adam state and gradient buckets, autocast to FP16 with weight copies, no activation
checkpointing, the pixels of a step as FP32 on the GPU unless "data offload" is on, dense losses in FP32 (two logit
matrices and their gradients, 16 bytes per logit, and four gathered feature matrices). The peak is Equation 10: states,
data and features, plus the larger of the towers' graph and the loss.

Fitted, each on cells of Table 1: a block keeps 40 bytes per token and width (8 GPUs, 32k, offload); 10 copies of a
rank's features (8 GPUs, 256k against 32k); the tiled loss holds 16 copies (8 GPUs, 1024k against 256k, offload).
"""

from infcl.models.config import load_model_config
from infcl.plan.activations import BLOCK_BYTES, activation_bytes
from infcl.plan.profile import load_gpu
from infcl.plan.setting import Setting, parameters_of
from infcl.plan.timing import step_seconds

_BYTES_PER_TOKEN = 40
_FEATURE_COPIES = 10
_TILED_COPIES = 16


def paper_memory(setting: Setting) -> dict[str, float]:
    """{part: bytes per GPU}, "loss" and "peak" as the paper's tables have them. setting.pixels: "device" or "host"."""
    model, rows, batch = setting.model, setting.rank_batch, setting.global_batch
    parameters = parameters_of(model)
    block = rows * model.embed_dim * 4.0
    gathered = 4.0 * batch * model.embed_dim * 4
    loss = {"clip": 16.0 * batch * batch + gathered, "open_clip": 16.0 * rows * batch + gathered}
    graph = activation_bytes(
        model, micro_batch_size=setting.micro_batch, precision="amp_bf16", checkpointing=False, compiled=False
    )
    parts = {
        "parameters": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "optimizer": 8.0 * parameters,
        "gradient buckets": 4.0 * parameters,
        "cached data": rows * (4.0 * 3 * model.vision_cfg.image_size**2 + 8 * model.text_cfg.context_length),
        "features": _FEATURE_COPIES * block,
        "activations": graph * _BYTES_PER_TOKEN / BLOCK_BYTES["amp_bf16"] + 2.0 * parameters,
        "loss": loss.get(setting.loss, _TILED_COPIES * block),
    }
    if setting.pixels == "host":
        parts["cached data"] = setting.micro_batch * parts["cached data"] / rows
    lasting = sum(parts.values()) - parts["activations"] - parts["loss"] - parts["features"]
    parts["peak"] = lasting + max(parts["activations"] + parts["features"], parts["loss"])
    return parts


def paper_step(model: str, gpus: int, global_batch: int) -> float:
    """Seconds of a step of its trainer on A800s, as planned: eager blocks, autocast, torch's attention."""
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
