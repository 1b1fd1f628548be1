"""Steps of engines on small models, and the same steps of one process in float64: `engine_steps`, `one_process`."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from infcl.config import BatchPlan, TrainConfig
from infcl.engine.engine import Engine
from infcl.engine.parameter_groups import parameter_groups
from infcl.models import CLIP, load_model_config
from infcl.parallel import init_parallel, mean_over, micro_batch_seed
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.recorded_graphs import recorded_graphs
from tests.lib.specs import engine_of, spec_of
from tests.lib.step_oracle import EPS, LR, ToyCLIP, adamw, global_batch, whole_batch_gradients
from tests.lib.tensor_parallel import batch_of_pairs, layout, new_model

START = math.log(90)
CEILING = START - 0.05  # the unclamped run falls by 0.03 in the three steps and does not reach it


def demo_model(**options) -> CLIP:
    torch.manual_seed(0)
    return CLIP(load_model_config(GOLDEN_MODEL), patch_dropout=0.25, **options)


def demo_batch(size: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 3, 32, 32), generator=generator, dtype=torch.uint8)
    texts = torch.randint(2, 300, (size, 20), generator=generator)
    texts[torch.arange(size), torch.randint(20, (size,), generator=generator)] = 1  # caption ends, which are pooled
    return images, texts


class Subject(NamedTuple):
    """A model whose steps are compared, and their batches."""

    model: Callable[..., Any]
    batch: Callable[[int, int], tuple]  # rows, number of the step -> (images, texts)
    micro_batches: int
    size: int  # of a micro-batch
    numbers: Iterable[int] = range(3)  # of the steps
    grad_clip_norm: float | None = 0.5
    wd: float = 0.1
    ceiling: float = math.inf  # of logit_scale
    ema_decay: float | None = None

    def start(self) -> dict[str, torch.Tensor]:
        return self.model().state_dict()


TOY = Subject(partial(ToyCLIP, START), global_batch, 3, 5, ceiling=CEILING, ema_decay=0.15)
TOY_WITH_DROPOUT = TOY._replace(model=partial(ToyCLIP, START, 0.3))
TOWERS = Subject(demo_model, demo_batch, 4, 3, [1], None, 0.0)
SPLIT = Subject(new_model, batch_of_pairs, 3, 4)


class Steps(NamedTuple):
    """What steps gave. norms: of the image tower's, the text tower's and all gradients, in each step."""

    losses: list[float]
    norms: list[list[float]]
    state: dict[str, torch.Tensor]
    scales: list[float] = []  # logit_scale as the loss saw it
    applied: list[bool] = []
    bad_rows: list[int] = []  # of the last step that was not applied
    counters: dict[str, float] = {}
    average: dict[str, torch.Tensor] | None = None
    overlaps: bool = False  # whether DeepSpeed's optimizer reduces during each backward
    seen: Any = None  # by `look`


def settings(preset: str, **changes) -> TrainConfig:
    """Return the config of small models' steps under a preset of ds_configs/, or a preset's file."""
    path = preset if preset.endswith(".json") else f"ds_configs/{preset}.json"
    given = {"deepspeed_config": path, "lr": LR, "eps": EPS, "wd": 0.1, "grad_clip_norm": 0.5}
    return TrainConfig(dataset_type="synthetic", train_num_samples=1, **(given | changes))


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
    parallel = init_parallel("cpu")
    config = settings(preset, **{"precision": "fp32"} | flags)
    return engine_of(model, config, parallel, BatchPlan(parallel.dp_size, micro_batches, micro_batch_size))


def engine_steps(
    rank, world_size, subject, preset, *, resident=1, dropped=False, graphed=False, poisoned=None, look=None, **flags
) -> Steps:
    """Make the subject's steps on this rank's share of its batches.

    Args:
        resident: micro-batches that keep their graphs.
        dropped: a graph is made and dropped before, as --resident-micro-batches auto measures one.
        graphed: encode by recorded CUDA graphs.
        poisoned: number of the step in which a pixel of rank 1's second micro-batch is NaN.
        look: called with the engine at the end.
        flags: FP32 and the subject's clip and weight decay unless given.
    """
    from infcl.checkpoint.load import full_weights
    from infcl.models.packing import texts_for_model
    from infcl.train.build import build_loss, split_model
    from infcl.train.compile import prepare_blocks
    from infcl.train.graphs import graph_towers

    own = {name: getattr(subject, name) for name in ("grad_clip_norm", "wd", "ema_decay")}
    config = settings(preset, **{"precision": "fp32"} | own | flags)
    size = config.tensor_parallel_size
    parallel = init_parallel("cpu") if size == 1 else layout(size)
    batch = BatchPlan(parallel.dp_size, subject.micro_batches, subject.size)
    model = subject.model(**{"activation_checkpointing": True} if config.grad_checkpointing else {})
    split_model(model, parallel)
    spec, as_taken = spec_of(config, parallel, batch), lambda texts: {"texts": texts}
    if isinstance(model, CLIP):
        assert prepare_blocks(model, spec, parallel) == (config.compile_blocks == "on")
        as_taken = texts_for_model(model.cfg.text_cfg, pack=spec.packs_captions)
    engine = Engine(model, spec, parallel)
    loss, found, bad_rows = build_loss(spec, parallel), [], []

    def encode(images, texts):
        return engine.encode(images, **as_taken(texts))

    engine.train()
    with recorded_graphs() if graphed else nullcontext():
        if graphed:
            graph_towers(model)
        if dropped:
            encode(*subject.batch(subject.size, 1))
        for number in subject.numbers:
            own = own_micro_batches(batch, parallel.dp_rank, subject.batch(batch.global_batch_size, number))
            if number == poisoned and rank == 1:
                own[1][0][2, 3] = math.nan
            seeds = seeds_of(number, parallel.dp_rank, subject.micro_batches)
            output = accumulate(engine, own, seeds, encode=encode, loss=loss, resident=resident)
            applied = engine.step(config.lr)
            engine.clamp_logit_scale(subject.ceiling)
            engine.state.update_average()
            if not applied:
                bad_rows = (~output.finite_rows["image_features"]).nonzero().flatten().tolist()
            mean = float(mean_over(engine.dp_group, output.loss))
            found.append((mean, engine.norms.tolist(), float(output.logit_scale), applied))
    losses, norms, scales, applied = map(list, zip(*found))
    assert all(applied) or poisoned is not None
    average = full_weights(engine, keep=True, ema=True) if engine.state.ema_decay else None
    overlaps = getattr(engine.engine.optimizer, "overlap_comm", False)
    weights, seen = full_weights(engine, keep=True), look and look(engine)
    return Steps(losses, norms, weights, scales, applied, bad_rows, engine.counters(), average, overlaps, seen)


def own_micro_batches(batch: BatchPlan, rank: int, sides) -> list[tuple]:
    """Return the (images, texts) of each micro-batch of a data-parallel rank."""
    own = slice(rank * batch.rank_batch_size, (rank + 1) * batch.rank_batch_size)
    return list(zip(*(side[own].split(batch.micro_batch_size) for side in sides)))


def seeds_of(step: int, rank: int, micro_batches: int) -> list[int]:
    """Return the seed of each micro-batch of a rank in a step."""
    return [micro_batch_seed(0, step, index, rank) for index in range(micro_batches)]


def one_process(
    subject: Subject,
    ranks: int,
    *,
    optimizer=adamw,
    rate: Callable[[str], float] | None = None,
    dtype=torch.float64,
) -> Steps:
    """Make the subject's steps on the batches of so many data-parallel ranks, all rows in one graph.

    Args:
        subject: as given to `engine_steps`.
        ranks: data-parallel ranks.
        optimizer: parameter groups -> torch optimizer.
        rate: a parameter's name -> its learning rate over LR.
        dtype: of the parameters.
    """
    model, losses, norms = subject.model().to(dtype).train(), [], []
    if rate is None:
        groups = parameter_groups(model, TrainConfig(wd=subject.wd), LR)
    else:
        groups = [{"params": [p], "lr": LR * rate(n), "weight_decay": 0.0} for n, p in model.named_parameters()]
    optimizer, average = optimizer(groups), {n: value.clone() for n, value in model.state_dict().items()}
    for done, number in enumerate(subject.numbers):
        sides = subject.batch(ranks * subject.micro_batches * subject.size, number)
        seeds = [seed for rank in range(ranks) for seed in seeds_of(number, rank, subject.micro_batches)]
        loss, gradients = whole_batch_gradients(model, zip(*(side.split(subject.size) for side in sides)), seeds)
        images = [gradient for name, gradient in gradients.items() if name.startswith("visual.")]
        texts = [gradient for name, gradient in gradients.items() if not name.startswith(("visual.", "logit_"))]
        norms.append([float(nn.utils.get_total_norm(part)) for part in (images, texts, list(gradients.values()))])
        nn.utils.clip_grad_norm_(model.parameters(), subject.grad_clip_norm or math.inf)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=subject.ceiling)
        decay = min(subject.ema_decay or 0.0, (1 + done) / (10 + done))
        average = {n: decay * average[n] + (1 - decay) * value for n, value in model.state_dict().items()}
        losses.append(loss.item())
    return Steps(losses, norms, {n: v.detach().clone() for n, v in model.state_dict().items()}, average=average)
