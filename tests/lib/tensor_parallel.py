"""Small towers whose heads divide by 2 and 4, layouts of T x D ranks, and the float64 reference of their steps."""

import math

import torch
import torch.distributed as dist
from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.models import CLIP, CLIPConfig, TextConfig, VisionConfig
from infcl.parallel import Parallel, init_parallel, mean_over
from tests.lib.step_oracle import EPS, LR, train_in_float64

CFG = CLIPConfig(
    embed_dim=20,
    vision_cfg=VisionConfig(image_size=12, layers=2, width=24, head_width=6, patch_size=4, mlp_ratio=2.0),
    text_cfg=TextConfig(context_length=7, vocab_size=31, width=16, heads=4, layers=2, mlp_ratio=3.0),
)
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1)]  # (T, D)
_groups: set[dist.ProcessGroup] = set()  # made by megatron-core in this process
GRAD_CLIP, DECAY = 0.5, 0.1
MICRO_BATCHES, MICRO_BATCH_SIZE = 3, 4


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


def settings(preset: str, size: int, **changes) -> TrainConfig:
    given = {"deepspeed_config": f"ds_configs/{preset}.json", "lr": LR, "eps": EPS, "wd": DECAY}
    given |= {"grad_clip_norm": GRAD_CLIP, "tensor_parallel_size": size}
    given |= {"precision": "fp32", "dataset_type": "synthetic", "train_num_samples": 1, "pack_captions": "off"}
    return TrainConfig(**given | changes)


def new_model(cfg: CLIPConfig = CFG, **options) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(cfg, init_logit_scale=math.log(20), **options)
    with torch.no_grad():  # with the initial biases of zero, a bias added twice would not be seen
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def global_batch(size: int, seed: int, cfg: CLIPConfig = CFG) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, cfg.vision_cfg.image_size, cfg.vision_cfg.image_size, generator=generator)
    return images, torch.randint(0, cfg.text_cfg.vocab_size, (size, cfg.text_cfg.context_length), generator=generator)


def train_steps(
    parallel: Parallel, config: TrainConfig, steps: int, *, micro_batches: int = MICRO_BATCHES, **model_options
):
    """Run optimizer steps on this rank's share; return engine, losses, gradient norms, [image, text] norms."""
    from infcl.engine.engine import Engine
    from infcl.models.packing import texts_for_model
    from infcl.train.build import build_loss, split_model
    from infcl.train.compile import prepare_blocks
    from tests.lib.engine_steps import accumulate, own_micro_batches
    from tests.lib.specs import spec_of

    batch = BatchPlan(parallel.dp_size, micro_batches, MICRO_BATCH_SIZE)
    model = new_model(**model_options)
    split_model(model, parallel)
    spec = spec_of(config, parallel, batch)
    assert prepare_blocks(model, spec, parallel) == (config.compile_blocks == "on")
    engine = Engine(model, spec, parallel)
    loss, losses, norms, tower_norms = build_loss(spec, parallel), [], [], []
    as_taken = texts_for_model(CFG.text_cfg, pack=spec.packs_captions)

    def encode(images, texts):
        return engine.encode(images, **as_taken(texts))

    engine.train()
    for step in range(steps):
        own = own_micro_batches(batch, parallel.dp_rank, global_batch(batch.global_batch_size, seed=step))
        seeds = [100 * step + 10 * parallel.dp_rank + i for i in range(micro_batches)]
        output = accumulate(engine, own, seeds, encode=encode, loss=loss)
        assert engine.step(config.lr)
        tower_norms.append(engine.norms[:2].tolist())
        losses.append(float(mean_over(engine.dp_group, output.loss)))
        norms.append(float(engine.norms[2]))
    return engine, losses, norms, tower_norms


def oracle(dp_size: int, steps: int):
    """Run one process in float64 on the whole batch; return losses, norms, [image, text] norms, state dict."""
    batches = [global_batch(dp_size * MICRO_BATCHES * MICRO_BATCH_SIZE, seed=step) for step in range(steps)]
    tower_norms = []

    def note_norms(model):
        towers = {True: [], False: []}
        for name, parameter in model.named_parameters():
            if not name.startswith("logit"):
                towers[name.startswith("visual.")].append(parameter.grad)
        tower_norms.append([float(nn.utils.get_total_norm(towers[side])) for side in (True, False)])

    losses, norms, state = train_in_float64(
        new_model(),
        batches,
        lambda model, batch: (model.visual(batch[0].double()), model.encode_text(batch[1])),
        grad_clip_norm=GRAD_CLIP,
        weight_decay=DECAY,
        before_clip=note_norms,
    )
    return losses, norms, tower_norms, state
