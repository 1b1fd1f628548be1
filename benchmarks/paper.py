"""Memory of the paper's trainer (Inf-CLIP, arXiv 2410.17243), to check the planner's parts against its tables.

It differs from ours: DDP with whole Adam state and gradient buckets, autocast to fp16 with weight copies, no activation
checkpointing, a step's pixels as fp32 on the GPU unless "data offload" is on, dense losses in fp32 (two logit matrices
and their gradients, 16 bytes a logit, and four gathered feature matrices). Peak is Equation 10: states, data and
features, plus the larger of the towers' graph and the loss.

Fitted, each on cells of Table 1: a block keeps 40 bytes a token and width (8 GPUs, 32k, offload); 10 copies of a rank's
features (8 GPUs, 256k against 32k); the tiled loss holds 16 copies (8 GPUs, 1024k against 256k, offload).
"""

from infcl.plan.activations import BLOCK_BYTES, activation_bytes
from infcl.plan.setting import Setting, parameters_of

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
