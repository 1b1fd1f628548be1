"""Small towers whose heads divide by 2 and 4, and layouts of T x D ranks."""

import math

import torch
import torch.distributed as dist

from infcl.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from infcl.parallel import Parallel, init_parallel

CFG = CLIPConfig(
    embed_dim=20,
    vision_cfg=VisionConfig(image_size=12, layers=2, width=24, head_width=6, patch_size=4, mlp_ratio=2.0),
    text_cfg=TextConfig(context_length=7, vocab_size=31, width=16, heads=4, layers=2, mlp_ratio=3.0),
)
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1)]  # (T, D)
_groups: set[dist.ProcessGroup] = set()  # made by megatron-core in this process


def layout(size: int) -> Parallel:
    """Put this rank into tensor-parallel groups of `size`, and remove any earlier layout."""
    from megatron.core import parallel_state

    from megatron_patches.groups import init_tensor_parallel

    known = dist.distributed_c10d._world.pg_map
    if parallel_state.is_initialized() and parallel_state.get_tensor_model_parallel_world_size() != size:
        parallel_state.destroy_model_parallel()
        while _groups:  # megatron-core drops them without ending their threads
            dist.destroy_process_group(_groups.pop())
    parallel, before = init_parallel("cpu"), set(known)
    if size > 1:
        parallel = init_tensor_parallel(parallel, size)
        _groups.update(set(known) - before)
    return parallel


def new_model(cfg: CLIPConfig = CFG, **options) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(cfg, init_logit_scale=math.log(20), **options)
    with torch.no_grad():  # with the initial biases of zero, a bias added twice would not be seen
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def batch_of_pairs(size: int, seed: int, cfg: CLIPConfig = CFG) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, cfg.vision_cfg.image_size, cfg.vision_cfg.image_size, generator=generator)
    return images, torch.randint(0, cfg.text_cfg.vocab_size, (size, cfg.text_cfg.context_length), generator=generator)
