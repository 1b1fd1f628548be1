"""The training loop: build the parts, fit, evaluate, save, finish.

A step is a pure function of (state, step number, seed, data). The step number determines the data position, the seeds
of the towers' randomness and the learning rate, so a resumed run repeats the uninterrupted one.
"""

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infcl.checkpoint.load import find_checkpoint, full_weights, load_checkpoint, trainer_state
from infcl.checkpoint.run_folder import RunFolder
from infcl.checkpoint.write import CheckpointWriter
from infcl.config import aligned, counted, teacher_in_words
from infcl.data.loader import TooManyBadSamples
from infcl.data.workers import describe_death
from infcl.engine.engine import Engine
from infcl.engine.parameter_groups import later_host_bytes
from infcl.models.attention import towers_with_kernel
from infcl.models.packing import texts_for_model
from infcl.parallel import (
    Parallel,
    describe_ranks,
    from_first_rank,
    gather_objects,
    join_parts,
    max_over,
    mean_over,
    micro_batch_seed,
    seed_everything,
)
from infcl.step.batches import build_step_batches, describe_pixels
from infcl.step.grad_cache import StepOutput, by_name, cached_step
from infcl.step.replay import RunningStatistics
from infcl.train.build import Inputs, build_loader, build_loss, build_model, build_schedule, build_tasks, split_model
from infcl.train.compile import prepare_blocks
from infcl.train.diagnostics import (
    PhaseTimer,
    SampledLoss,
    duplicate_shares,
    peak_memory_mb,
    trained_shares,
    utilisation,
)
from infcl.train.finite import Skips
from infcl.train.graphs import graph_towers
from infcl.train.metrics import MetricsWriter
from infcl.train.observers import Collapse, Observer, Step, StepProfiler, Stragglers
from infcl.train.resident import resident_micro_batches
from infcl.train.results import oddities, sum_reports, write_results
from infcl.train.saves import Saves, StopSignals
from infcl.train.teacher import Teacher

MAX_LOGIT_SCALE = math.log(100)  # OpenAI's bound; the clamp holds through the next step in every ZeRO stage


class Trainer:
    """The parts of a run and its loop. Parts with cheap usage errors are built first: data, model, engine.

    Args:
        inputs: resolved flags, model config and tokenizer.
        parallel: the ranks.
        run: the claimed run folder.
        noted: signals received so far (see StopSignals).
    """

    def __init__(self, inputs: Inputs, parallel: Parallel, run: RunFolder, *, noted: list[int] | None = None):
        self.inputs, self.parallel, self.run = inputs, parallel, run
        self.spec, self.config, self.batch = inputs.spec, inputs.spec.flags, inputs.spec.batch
        self._build_data()
        self._build_engine()
        checkpoint = find_checkpoint(self.config.resume, run, parallel)
        self._build_step(trainer_state(checkpoint) if checkpoint is not None else None)
        self._build_saves(noted)
        self._open_run_folder(checkpoint)
        self._build_observers()

    def _build_data(self) -> None:
        """Build the loader, the evaluations and the schedule."""
        self.loader = build_loader(self.inputs, self.parallel)
        self.tasks = build_tasks(self.inputs)
        for task in self.tasks.values():
            task.check()
        frequencies = {"retrieval": self.config.val_frequency, "zero_shot": self.config.zeroshot_frequency}
        self.frequencies = {name: frequencies[name] for name in self.tasks}  # in epochs; 0: only at the end
        self.schedule = build_schedule(self.spec, self.loader)
        self.total_steps = self.schedule.total_steps

    def _build_engine(self) -> None:
        """Build the teacher and the towers, split and compile these, and wrap them in the DeepSpeed engine."""
        config, parallel = self.config, self.parallel
        seed_everything(config.seed, deterministic=config.deterministic)
        model, self.sources_of_weights = build_model(config, self.inputs.model_config)
        self.model_config = model.cfg
        has_teacher = bool(config.distill_model or config.teacher_key)
        self.teacher = Teacher(self.spec, parallel, self.inputs.teacher) if has_teacher else None
        split_model(model, parallel)
        self.compiled = prepare_blocks(model, self.spec, parallel)
        self.engine = Engine(model, self.spec, parallel)
        if config.cuda_graphs:
            graph_towers(model)
        self.num_parameters = sum(self.engine.state.shape(p).numel() for _, p in self.engine.state.parameters())

    def _build_step(self, before: Mapping | None) -> None:
        """Build the micro-batches of a step and the loss. `before` is the trainer's state in the checkpoint, if any."""
        spec, parallel, module = self.spec, self.parallel, self.engine.module
        self.texts_for_model = texts_for_model(self.model_config.text_cfg, pack=spec.packs_captions)
        self.resident, self.graphs = resident_micro_batches(
            spec, self.engine, self.model_config, parallel, before=before, teacher_width=self.inputs.teacher_size[1]
        )
        self.batches = build_step_batches(
            spec,
            module,
            parallel,
            resident=self.resident,
            repeats=self.loader.repeats,
            reserved=later_host_bytes(spec, module),
            teacher=self.teacher,
        )
        self.loss = build_loss(spec, parallel)
        self.sampled_loss = SampledLoss(
            self.loss,
            rows=self.batch.micro_batch_size,
            margin=self.config.false_negative_margin,
            sigmoid=self.config.loss == "siglip",
            distills=self.teacher is not None,
        )
        self.mfu = utilisation(self.model_config, parallel.device, spec.precision, trained_shares(module))

    def _build_saves(self, noted: list[int] | None) -> None:
        """Build the checkpoint writer and the observers that may end the run; initialise the loop's state."""
        config = self.config
        self.checkpoints = CheckpointWriter(
            self.engine, self.run, self.parallel, keep_last=config.keep_checkpoints,
        )  # fmt: skip
        self.signals = StopSignals(noted)
        self.saves = Saves(
            config, self.loader.steps_per_epoch, self.parallel,
            checkpoints=self.checkpoints, signals=self.signals, state=self._state,
        )  # fmt: skip
        self.skips = Skips(
            self.engine, self.parallel, self.saves, lambda text: self.metrics.say(text),
        )  # fmt: skip
        self.step, self.train_seconds = 0, 0.0
        self.averages = config.ema_decay is not None  # are evaluated and exported

    def _build_observers(self) -> None:
        """Build the observers in calling order: metrics writes what those before it found."""
        config, parallel = self.config, self.parallel
        self.profiler = StepProfiler(
            config.profile, self.run.root / "profile", on_gpu=self.timer.on_gpu, enabled=parallel.rank == 0
        )
        encoding_waits = self.spec.zero_stage == 3 or parallel.tp_size > 1
        stragglers = Stragglers(parallel, every=config.log_every_n_steps, encoding_waits=encoding_waits)
        warmup = self.schedule.warmup
        advice = (
            f"Try a smaller --lr (now {config.lr:g}), a longer --warmup (now {warmup:,} steps), or a start from a run "
            "at a smaller batch (--pretrained RUN)"
        )
        collapse = Collapse(self.sampled_loss.rows, warmup=warmup, advice=advice)
        self.observers: list[Observer] = [stragglers, self.profiler, collapse, self.metrics, self.skips, self.saves]

    # ---- the loop ----

    def fit(self) -> dict:
        """Train to the last step, evaluate and export. infcl/train/ending.py handles all errors of a run.

        Returns:
            The contents of summary.json.

        Raises:
            Stopped: after a checkpoint, when a rank has received a signal.
        """
        try:
            return self._fit()
        except RuntimeError as error:
            if death := describe_death(error, self.parallel.rank, self.loader.worker_memory_mb()):
                raise RuntimeError(death) from None  # its traceback would point to unrelated code
            raise
        finally:
            self.metrics.close()
            if self.parallel.rank == 0:
                self.run.leave()

    def _fit(self) -> dict:
        with self.signals:
            self._train()
            if news := self.profiler.close():
                self.metrics.say(news)
            signal = self.saves.end()
        if not signal:
            self.signals.act_on_late()
        return self._finish()

    def _train(self) -> None:
        steps_per_epoch = self.loader.steps_per_epoch
        if self.step < self.total_steps and self.checkpoints.newest and self.step % steps_per_epoch == 0:
            done = from_first_rank(lambda: self.metrics.evaluated_at(self.step))
            self._evaluate(self.step // steps_per_epoch, done)  # the run ended between checkpoint and evaluation
        while self.step < self.total_steps:
            epoch = self.step // steps_per_epoch
            self.loader.set_position(epoch, self.step % steps_per_epoch)
            self.timer.mark("data")
            steps = self.loader.steps(self.batches.pixels.again)
            with contextlib.closing(steps), self.batches:  # ends the workers
                for micro_batches in steps:
                    step = self.train_step(micro_batches)
                    for observer in self.observers:
                        observer.after_step(step)
                    if self.ends_for_bad_samples:
                        self._end_for_bad_samples()
                    if step.is_last:
                        break
                    self.timer.mark("data")
            if self.step < self.total_steps:
                self._evaluate(self.step // steps_per_epoch)

    def train_step(self, micro_batches: Iterator[dict[str, torch.Tensor]]) -> Step:
        """Train one step on the M micro-batches that the loader yields, and on those that it reads a second time."""
        started = time.perf_counter()
        self.batches.begin(micro_batches)
        output = self._encode_and_replay()
        lr, applied = self._update()
        return self._measure(started, output, lr, applied)

    def _encode_and_replay(self) -> StepOutput:
        """Encode all micro-batches, compute the loss once, and propagate its gradients back through the towers."""
        self.engine.train()
        self.skips.begin()
        self.statistics = RunningStatistics(self.engine.module)

        def on_phase(phase: str) -> None:
            self.timer.mark(phase)
            self.statistics.on_phase(phase)

        with self.statistics:
            output = cached_step(
                self.batches,
                encode=self.engine.encode,
                loss=by_name(self._loss),
                backward=self.engine.backward,
                seeds=[
                    micro_batch_seed(self.config.seed, self.step, index, self.parallel.dp_rank)
                    for index in range(self.batch.num_micro_batches)
                ],
                scalar_values=self.engine.scalar_values,
                on_phase=on_phase,
                resident=self.resident,
            )
        self.timer.mark("step")
        self.batches.check()
        return output

    def _update(self) -> tuple[float, bool]:
        """Update the weights. Return the learning rate, and whether the step was applied."""
        lr = self.schedule(self.step)
        applied = self.engine.step(lr)
        self.engine.clamp_logit_scale(MAX_LOGIT_SCALE)
        if applied:
            self.engine.state.update_average()
            self.statistics.publish(self.engine.dp_group)
        self.step += 1
        self.skips.count(applied)
        return lr, applied

    def _measure(self, started: float, output: StepOutput, lr: float, applied: bool) -> Step:
        """Collect the metrics of the step for observers. Collective; waits for the device."""
        bad = sum(n for name, n in self.loader.report().items() if name.startswith("skipped/"))
        bad_data = output.loss.new_tensor([bad, self.loader.too_many_bad is not None])
        own = torch.cat([output.loss.view(1), self.sampled_loss.values, bad_data])
        loss, *sampled, skipped_samples, ranks_to_end = mean_over(dist.group.WORLD, own).tolist()
        self.ends_for_bad_samples = ranks_to_end > 0
        phases = self.timer.read()
        seconds = time.perf_counter() - started
        self.train_seconds += seconds
        values: dict[str, float | None] = {
            "loss": loss,
            "logit_scale": float(output.logit_scale.exp()),
            "lr": lr,
            "samples_per_second": self.batch.global_batch_size / seconds,
            "mfu": self.mfu(
                self.batch.global_batch_size / self.parallel.world_size / seconds,
                self.batches.text_share * self.config.texts_per_image,
            ),
            "text_share": self.batches.text_share,
            "data_wait": self.batches.waited / seconds,
            "peak_memory_mb": peak_memory_mb(self.parallel.device),
            "worker_memory_mb": max(self.loader.worker_memory_mb(), default=0.0),
            "skipped_steps": self.skips.total,
            "skipped_samples": round(skipped_samples * self.parallel.world_size),
            "loss_scale": self.engine.loss_scale(),
        }
        values |= self.schedule.tower_rates(self.step - 1)
        values |= dict(zip(self.sampled_loss.names, sampled))
        values |= dict(zip(("grad_norm_image", "grad_norm_text", "grad_norm"), self.engine.norms.tolist()))
        values |= {f"seconds_{name}": value for name, value in phases.items()}
        if (same := self._same_ids()) is not None:
            values |= duplicate_shares(same, self.parallel.dp_group)
        return Step(
            number=self.step,
            samples_seen=self.samples_seen,
            seconds=seconds,
            phases=phases,
            loss=loss,
            applied=applied,
            is_last=self.step == self.total_steps,
            output=output,
            batches=self.batches,
            values=values,
        )

    def _end_for_bad_samples(self) -> None:
        """Save, then raise TooManyBadSamples on all ranks, with the table of the first rank that has too many."""
        own = self.loader.too_many_bad
        reports = gather_objects(f"rank {self.parallel.rank}: {own}" if own else "")
        self.saves.finish()
        raise TooManyBadSamples(f"{next(filter(None, reports))}\n{self.checkpoints.hint}")

    def _loss(self, *features: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {}
        if (ids := self._same_ids()) is not None:
            given["ids"] = ids.squeeze(1)
        if self.teacher is not None:
            given["teacher"] = *map(torch.cat, zip(*self.batches.teacher)), self.teacher.scale
        return self.sampled_loss(*features, **given)

    def _same_ids(self) -> torch.Tensor | None:
        """Return int64 [b, 1 (+ 1 hard negative)], equal for duplicates; None if they are not compared."""
        own = [join_parts(self.parallel, ids.to(self.parallel.device)) for ids in self.batches.same_ids]
        return torch.cat(own) if own else None

    @property
    def samples_seen(self) -> int:
        return self.step * self.batch.global_batch_size

    # ---- evaluation ----

    def _evaluate(self, epochs_done: int, done: Collection[str] = ()) -> None:
        due = [name for name, n in self.frequencies.items() if n and epochs_done % n == 0 and name not in done]
        if due:
            self.checkpoints.publish()  # so that no epoch is lost if an evaluation fails or is stopped
        for name in due:
            self._run_task(name)

    def _encode_for_evaluation(
        self, images: torch.Tensor | None, texts: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Encode images on the device or texts on the host."""
        given = {} if texts is None else self.texts_for_model(texts)
        return self.engine.encode(images, **{name: value.to(self.parallel.device) for name, value in given.items()})

    def _run_task(self, name: str) -> dict[str, float]:
        self.engine.train(False)
        with self.engine.showing_average() if self.averages else contextlib.nullcontext():
            values = self.tasks[name].run(self._encode_for_evaluation, self.parallel, self.engine.scalar_values)
        self.metrics.evaluation(name, self.step, self.samples_seen, values, self.tasks[name].about)
        return values

    # ---- checkpoints and the end ----

    def _open_run_folder(self, checkpoint: Path | None) -> None:
        """Resume or start from scratch; write to the folder last, when no usage error is possible any more."""
        if checkpoint is not None:
            self._continue_from(checkpoint)
        model_config, tokenizer = self.model_config.to_json(), self.inputs.tokenizer
        changed = self.run.open(self.config, model_config, self.parallel, checkpoint, tokenizer)
        self.metrics = MetricsWriter(
            self.run,
            self.config,
            enabled=self.parallel.rank == 0,
            total_steps=self.total_steps,
            samples_seen=self.samples_seen,
        )
        self.timer = PhaseTimer(self.parallel.device)
        self._announce()
        if checkpoint is not None:
            self.checkpoints.continue_from(checkpoint, self.step)
            self.metrics.say(f"resumed from {checkpoint} at step {self.step}")
        if changed:
            self.metrics.say(f"flags that differ from the run's: {'; '.join(changed)}")

    def _state(self) -> dict:
        """Return the loop's state for a checkpoint."""
        return {
            "step": self.step,
            "samples_seen": self.samples_seen,
            "skipped_steps": self.skips.total,
            "skipped_in_a_row": self.skips.in_a_row,
            "train_seconds": self.train_seconds,
            "world_size": self.parallel.world_size,
            "graphs": self.graphs,
            "loader": self.loader.state_dict(),
        }

    def _continue_from(self, checkpoint: Path) -> None:
        """Restore engine, loader and loop. Raise ValueError if the flags do not match the checkpoint."""
        state = load_checkpoint(self.engine, checkpoint)
        self.loader.load_state_dict(state["loader"])
        self.step, self.skips.total = state["step"], state["skipped_steps"]
        self.skips.in_a_row = state["skipped_in_a_row"]
        position = state["loader"]["epoch"], state["loader"]["step"]
        if position != divmod(self.step, self.loader.steps_per_epoch):
            raise ValueError(
                f"{checkpoint} is of step {self.step} = epoch {position[0]}, step {position[1]}; an epoch has "
                f"{self.loader.steps_per_epoch} steps now: give the --train-num-samples of the run"
            )
        if self.step > self.total_steps:
            raise ValueError(f"{checkpoint} is of step {self.step}, the flags end the run at {self.total_steps}")
        self.train_seconds = state["train_seconds"]

    def _announce(self) -> None:
        """Print the table of the run's settings, then warnings about flags that may be unintended."""
        config, schedule = self.config, self.schedule
        by_triton = ", ".join(towers_with_kernel(self.engine.module))
        towers = [
            f"{'compiled' if self.compiled else 'eager'} blocks",
            *(["CUDA graphs"] if config.cuda_graphs else []),
            *([f"Triton attention ({by_triton})"] if by_triton else []),
            f"cached activations of {counted(self.resident, 'micro-batch', 'micro-batches')}",
            f"{'packed' if self.spec.packs_captions else 'padded'} captions",
        ]
        teacher = teacher_in_words(vars(config))
        rows = {
            "model": f"{config.model}, {self.num_parameters / 1e6:.2f}M parameters",
            "data": f"{self.loader.num_samples:,} samples",
            "batch": str(self.batch),
            "steps": f"{self.total_steps:,}",
            "loss": config.loss,
            **({"teacher": f"{teacher}, scale {self.teacher.scale:.4g}"} if self.teacher else {}),
            "engine": f"{self.spec.zero_in_words}, {self.spec.precision}, {describe_ranks(self.parallel)}",
            "towers": ", ".join(towers),
            "pixels": describe_pixels(self.batches),
            "optimizer": f"{config.opt}, learning rate {schedule}: {schedule.describe_warmup()}",
        }
        lines = [aligned(rows.items())]
        if self.parallel.tp_size > 1:
            from megatron_patches.patches import describe_patches

            lines.append(describe_patches())
        lines += filter(None, [self.batch.smaller_than_asked(config), schedule.oddity()])
        if self.step == 0:  # a resumed run has its weights from a checkpoint, and has reported this before
            lines += [*self.sources_of_weights, *oddities(config, self.model_config.embed_dim)]
        for line in lines:
            self.metrics.say(line)

    def _finish(self) -> dict:
        """Evaluate, export, and return the contents of summary.json."""
        results = {name: self._run_task(name) for name in self.tasks}
        weights = full_weights(self.engine, keep=self.parallel.rank == 0, ema=self.averages)
        peak = max_over(dist.group.WORLD, [peak_memory_mb(self.parallel.device)], self.parallel.device)[0]
        retrieval, newest = results.get("retrieval", {}), self.checkpoints.newest
        summary = {
            "zero_shot_top1": results.get("zero_shot", {}).get("top1"),
            "image_to_text_r1": retrieval.get("image_to_text_r1"),
            "text_to_image_r1": retrieval.get("text_to_image_r1"),
            "samples_seen": self.samples_seen,
            "steps": self.step,
            "skipped_steps": self.skips.total,
            "failed_saves": self.checkpoints.failed,
            "lost_metrics": self.metrics.lost,
            "train_seconds": round(self.train_seconds, 1),
            "peak_memory_mb": round(peak, 1),
            "zero_stage": self.engine.zero_stage,
            "world_size": self.parallel.world_size,
            "data": sum_reports(self.loader.report()),
            "evaluation": results,
            "evaluated_with": {name: dict(task.about) for name, task in self.tasks.items() if task.about},
            "ema": self.averages,
            "paths": {
                "run": str(self.run.root),
                "loss_curve": str(self.run.loss_curve),
                "export": str(self.run.export),
                "checkpoint": str(newest) if newest else None,
            },
        }
        write_results(self.run, weights, self.model_config, summary)
        return summary
