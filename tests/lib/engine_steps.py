"""Steps of an engine on the toy model, and the reference steps of one process in float64."""

import math

from infcl.config import BatchPlan, TrainConfig
from infcl.parallel import micro_batch_seed
from tests.lib.specs import engine_of
from tests.lib.step_oracle import EPS, LR, ToyCLIP, global_batch, oracle_steps

MICRO_BATCHES, MICRO_BATCH_SIZE, STEPS = 3, 5, 3
CLIP, DECAY = 0.5, 0.1
START = math.log(90)
CEILING = START - 0.05  # the unclamped run falls by 0.03 in the three steps and does not reach it


def settings(preset: str, **changes) -> TrainConfig:
    """Return the config of the toy model's steps under a preset of ds_configs/."""
    given = {"deepspeed_config": f"ds_configs/{preset}.json", "lr": LR, "eps": EPS, "wd": DECAY, "grad_clip_norm": CLIP}
    return TrainConfig(dataset_type="synthetic", train_num_samples=1, **(given | changes))


def own_micro_batches(batch: BatchPlan, rank: int, sides) -> list[tuple]:
    """Return the (images, texts) of each micro-batch of a data-parallel rank."""
    own = slice(rank * batch.rank_batch_size, (rank + 1) * batch.rank_batch_size)
    return list(zip(*(side[own].split(batch.micro_batch_size) for side in sides)))


def accumulate(engine, micro_batches, seeds, *, encode=None, loss=None, resident=1):
    """Run both passes of a step, after which the gradients are complete; return the StepOutput.

    Args:
        encode: images, texts -> features; by default engine.encode.
        loss: by default Inf-CL over the data-parallel ranks.
    """
    from infcl.loss.contrastive import ContrastiveLoss
    from infcl.step.grad_cache import by_name, cached_step

    return cached_step(
        micro_batches,
        encode=encode or engine.encode,
        loss=by_name(loss or ContrastiveLoss("inf_cl", group=engine.dp_group)),
        backward=engine.backward,
        seeds=seeds,
        scalar_values=engine.scalar_values,
        resident=resident,
    )


def engine_on_cpu(model, preset: str, micro_batches=1, micro_batch_size=4, **flags):
    """Make an engine of the model on this process's CPU rank; FP32 unless a flag says otherwise."""
    from infcl.parallel import init_parallel

    parallel = init_parallel("cpu")
    config = settings(preset, **{"precision": "fp32"} | flags)
    return engine_of(model, config, parallel, BatchPlan(parallel.dp_size, micro_batches, micro_batch_size))


def engine_steps(rank, world_size, preset, precision="fp32", resident=1, dropped=False, dropout=0.0, **changes):
    """Run STEPS optimizer steps on this rank's share; return losses, norms, the loss's logit scales, full weights.

    The last result is the weight average if there is one, else the number of steps that DeepSpeed counted.
    """
    from infcl.checkpoint.load import full_weights
    from infcl.parallel import mean_over

    batch = BatchPlan(world_size, MICRO_BATCHES, MICRO_BATCH_SIZE)
    model = ToyCLIP(logit_scale=START, dropout=dropout)
    engine = engine_on_cpu(model, preset, MICRO_BATCHES, MICRO_BATCH_SIZE, precision=precision, **changes)
    losses, norms, scales = [], [], []
    if dropped:
        engine.encode(*global_batch(MICRO_BATCH_SIZE))
    for step in range(STEPS):
        own = own_micro_batches(batch, rank, global_batch(batch.global_batch_size, seed=step))
        output = accumulate(engine, own, seeds_of(step, rank), resident=resident)
        assert engine.step(LR)
        engine.clamp_logit_scale(CEILING)
        engine.state.update_average()
        losses.append(float(mean_over(engine.dp_group, output.loss)))
        norms.append(float(engine.norms[2]))
        scales.append(float(output.logit_scale))
    last = full_weights(engine, keep=True, ema=True) if engine.state.ema_decay else engine.engine.global_steps
    return losses, norms, scales, full_weights(engine, keep=True), last


def seeds_of(step, rank, micro_batches=MICRO_BATCHES):
    """Return the seed of each micro-batch of a rank in a step."""
    return [micro_batch_seed(0, step, index, rank) for index in range(micro_batches)]


def expected(world_size, **options):
    """Return losses, norms and state of one process in float64 that makes the steps of `engine_steps`."""
    batches = [global_batch(world_size * MICRO_BATCHES * MICRO_BATCH_SIZE, seed=step) for step in range(STEPS)]
    fixed = {"grad_clip_norm": CLIP, "weight_decay": DECAY, "max_logit_scale": CEILING, "logit_scale": START}
    seeds = [[seed for rank in range(world_size) for seed in seeds_of(step, rank)] for step in range(STEPS)]
    return oracle_steps(batches, **fixed, seeds=seeds, **options)


def at_start():
    """Return the state dict of the toy model before the first step."""
    return ToyCLIP(logit_scale=START).state_dict()


def steps_with_a_poisoned_one(rank, world_size, preset, precision):
    """Run steps on batches 0, 1, 2. A pixel in rank 1's second micro-batch of batch 1 is NaN.

    Return which steps were applied, the rows of the poisoned step that are not finite, full weights and counters.
    """
    from infcl.checkpoint.load import full_weights

    batch = BatchPlan(world_size, MICRO_BATCHES, MICRO_BATCH_SIZE)
    engine = engine_on_cpu(ToyCLIP(logit_scale=START), preset, MICRO_BATCHES, MICRO_BATCH_SIZE, precision=precision)
    applied, finite = [], None
    for step in range(STEPS):
        own = own_micro_batches(batch, rank, global_batch(batch.global_batch_size, seed=step))
        if step == 1 and rank == 1:
            own[1][0][2, 3] = math.nan
        output = accumulate(engine, own, [0] * MICRO_BATCHES)
        applied.append(engine.step(LR))
        engine.clamp_logit_scale(CEILING)
        if step == 1:
            finite = (~output.finite_rows["image_features"]).nonzero().flatten().tolist()
    return applied, finite, full_weights(engine, keep=True), engine.counters()
