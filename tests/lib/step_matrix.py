"""Steps of the demo model with all combinations of a step's options, and the reference in one process."""

from contextlib import nullcontext

import torch

from infcl.config import BatchPlan
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.engine_steps import accumulate, own_micro_batches, seeds_of, settings
from tests.lib.step_oracle import LR, whole_batch_gradients

MICRO_BATCHES, MICRO_BATCH_SIZE, DROPOUT = 4, 3, 0.3


def weights_after_a_step(engine, batch, whole_batch, resident, encode):
    """Run a step on this rank's share of the batch; return {name: full tensor}."""
    from infcl.checkpoint.load import full_weights

    engine.train()
    rank = engine.parallel.rank
    own = own_micro_batches(batch, rank, whole_batch(batch.global_batch_size))
    accumulate(engine, own, seeds_of(0, rank, MICRO_BATCHES), encode=encode, resident=resident)
    assert engine.step(LR)
    return full_weights(engine, keep=True)


def gradients_in_one_process(world_size, model, whole_batch):
    """Return {name: gradient} of the whole batch, with each micro-batch's own seed."""
    sides = whole_batch(world_size * MICRO_BATCHES * MICRO_BATCH_SIZE)
    seeds = [seed for rank in range(world_size) for seed in seeds_of(0, rank, MICRO_BATCHES)]
    return whole_batch_gradients(model, zip(*(side.split(MICRO_BATCH_SIZE) for side in sides), strict=True), seeds)[1]


def demo_model(checkpointing):
    from infcl.models import CLIP, load_model_config

    torch.manual_seed(0)
    return CLIP(load_model_config(GOLDEN_MODEL), patch_dropout=0.25, activation_checkpointing=checkpointing)


def demo_batch(size):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (size, 3, 32, 32), generator=generator, dtype=torch.uint8)
    texts = torch.randint(2, 300, (size, 20), generator=generator)
    texts[torch.arange(size), torch.randint(20, (size,), generator=generator)] = 1  # caption ends, which are pooled
    return images, texts


def step_of_the_towers(
    rank, world_size, preset, resident, checkpointing, compiled, before_step=None, *, graphed=False, **flags
):
    """Run a step and return the weights, or the result of before_step(engine), called with the step's gradients."""
    from infcl.engine.engine import Engine
    from infcl.models.packing import texts_for_model
    from infcl.parallel import init_parallel
    from infcl.train.compile import prepare_blocks
    from infcl.train.graphs import graph_towers
    from tests.lib.recorded_graphs import recorded_graphs
    from tests.lib.specs import spec_of

    parallel = init_parallel("cpu")
    batch = BatchPlan(world_size, MICRO_BATCHES, MICRO_BATCH_SIZE)
    config = settings(
        preset, **({"precision": "fp32", "grad_clip_norm": None, "wd": 0.0} | flags),
        compile_blocks="on" if compiled else "off", grad_checkpointing=checkpointing,
    )  # fmt: skip
    model = demo_model(checkpointing)
    spec = spec_of(config, parallel, batch)
    assert prepare_blocks(model, spec, parallel) == compiled
    engine, packed = Engine(model, spec, parallel), texts_for_model(model.cfg.text_cfg, pack=spec.packs_captions)

    def encode(images, texts):
        return engine.encode(images, **packed(texts))

    step, answers = engine.step, []
    if before_step is not None:
        engine.step = lambda lr: answers.append(before_step(engine)) or step(lr)
    with recorded_graphs() if graphed else nullcontext():
        if graphed:
            graph_towers(model)
        weights = weights_after_a_step(engine, batch, demo_batch, resident, encode)
    return weights if before_step is None else answers[0]
