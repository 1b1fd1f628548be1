"""Run the demo model in processes of this machine, from a config."""

import contextlib
import dataclasses
from unittest import mock

from infcl.config import TrainConfig
from infcl.report import read_metrics
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.ranks import rejected, run_ranks
from tests.lib.tensor_parallel import layout as tensor_parallel_layout


def demo_config(demo_folder, logs, **changes) -> TrainConfig:
    """Return a small version of launch/demo.sh's settings: 20 steps of 64 pairs."""
    base = TrainConfig(
        train_data=str(demo_folder / "train"),
        tokenizer=str(demo_folder / "tokenizer.model"),
        model=GOLDEN_MODEL,
        workers=0,
        batch_size=32,
        accum_freq=2,
        steps=20,
        lr=1e-3,  # smaller than the demo's, so that rounding does not grow over the twenty steps
        wd=0.05,
        warmup=5,
        aug_cfg={"scale": (1.0, 1.0), "ratio": (1.0, 1.0)},
        logs=str(logs),
        name="run",
        save_frequency=0,
        resident_micro_batches="1",  # auto would cache all activations of a small model on a GPU and replay none
        precision="fp32",
        report_to="none",
    )
    return dataclasses.replace(base, **changes)


def new_trainer(config: TrainConfig, device: str = "cpu"):
    """Make this rank's Trainer, as pretrain_clip.py does."""
    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.parallel import init_parallel
    from infcl.train.build import resolve_inputs
    from infcl.train.trainer import Trainer

    size = config.tensor_parallel_size
    parallel = init_parallel(device) if size == 1 else tensor_parallel_layout(size)
    return Trainer(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))


class Killed(Exception):
    """Ends a run abruptly."""


def fit(rank, world_size, config: TrainConfig, die_after: int | None = None, *, draws: bool = False):
    """Train as pretrain_clip.py does; return {step: loss}. The run ends abruptly after step `die_after`.

    Args:
        draws: also draw the loss curve at the end, which takes longer than several steps.
    """
    trainer = new_trainer(config)

    class Mortal:
        def after_step(self, step):
            if step.number == die_after:
                trainer.checkpoints.publish()  # the last checkpoint was written in time
                raise Killed

    trainer.observers.insert(trainer.observers.index(trainer.saves), Mortal())  # after the metrics, before the save
    try:
        with contextlib.nullcontext() if draws else mock.patch("infcl.train.results.draw_loss_curve"):
            trainer.fit()
    except Killed:
        trainer.metrics.close()
    return None if rank else {r["step"]: r["loss"] for r in read_metrics(trainer.run.metrics, "train")}


def run_losses(world_size, *arguments, **options) -> list[float]:
    """Train with `fit` on `world_size` ranks; return the losses by step."""
    losses = run_ranks(fit, world_size, *arguments, **options)[0]
    return [losses[step] for step in sorted(losses)]


def rejection(rank, world_size, config) -> str | None:
    """Train and return the message of the ValueError that ended it, or None."""
    return rejected(fit, rank, world_size, config)


def said(rank, world_size, config) -> str:
    """Train and return the messages of the run."""
    with mock.patch("infcl.train.metrics.Console.say") as say:
        fit(rank, world_size, config)
    return "\n".join(call.args[0] for call in say.call_args_list)
