"""Compare attention kernels of the image tower, and its compiled embedding, in full training steps on one GPU.

    python -m benchmarks.attention --csv docs/results/attention_kernels.csv

Each model trains in one process, and its steps alternate between the variants below, so all of them share weights,
clock and allocator. A row is one segment of steps. The text tower always uses the single-tile Triton kernel.

    blocks           Triton kernel of several blocks, compiled embedding (the default)
    cudnn, flash     torch's scaled_dot_product_attention with this backend, compiled embedding
    eager embedding  as blocks, with the embedding before the residual blocks run by eager torch

The lines at the end have the median samples/s of each variant. A row has the attention kernels of one profiled step.
"""

import argparse
import statistics
import subprocess
import sys
import types
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch_config

from benchmarks.clock import hardware, require_gpus
from benchmarks.rows import append, parser_of_rows
from benchmarks.step import ONE_RESIDENT, config_of, shared_folder
from infcl.models import transformer
from infcl.models.attention import attend as attend_by_triton
from infcl.models.vision import add_positions, patch_rows
from infcl.parallel import destroy_parallel, init_parallel
from infcl.train.compile import _for_sizes

VARIANTS = ("blocks", "cudnn", "flash", "eager embedding")
SKIPPED = 2  # steps of a segment that are not measured: the allocator and the loader adapt
COMPILING = 3  # steps of each variant before the first segment; the last one is profiled
STEPS = {"ViT-L-14": 5, "ViT-B-16": 14}  # measured steps of a segment
COLUMNS = (
    "model", "micro_batch", "micro_batches", "variant", "repeat", "samples_per_second", "step_seconds", "peak_gib",
    "loss", "kernels", "device", "torch", "triton", "commit",
)  # fmt: skip


def main() -> None:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    parser.add_argument("--batch-size", type=int, default=0, help="micro-batch; 0: by the GPU's memory, 256 or 128")
    parser.add_argument("--repeats", type=int, default=3, help="segments of each variant")
    options, flags = parser.parse_known_args()
    require_gpus("benchmarks.attention")
    if len(options.models) > 1:
        for model in options.models:
            common = sys.argv[1:]
            subprocess.run([sys.executable, "-m", "benchmarks.attention", *common, "--models", model], check=False)
        return
    measure(options, flags)
    destroy_parallel()


def measure(options: argparse.Namespace, flags: list[str]) -> None:
    """Train one model with alternating variants, write a row per segment and print the table."""
    from infcl.checkpoint.run_folder import claim_run_folder
    from infcl.train.build import resolve_inputs
    from infcl.train.trainer import Trainer

    (model,) = options.models
    functorch_config.enable_autograd_cache = False  # its key does not have torch's attention backend
    # ViT-L-14's micro-batch of 256 needs more than 80 GB
    small = model == "ViT-L-14" and torch.cuda.get_device_properties(0).total_memory < 100e9
    size = options.batch_size or (128 if small else 256)
    each = SKIPPED + STEPS.get(model, 6)
    steps = len(VARIANTS) * (COMPILING + options.repeats * each)
    given = ["--model", model, "--batch-size", str(size), "--accum-freq", str(1024 // size), "--compile-blocks", "on"]
    with shared_folder() as folder:
        config = config_of("1", {}, steps, [*given, *ONE_RESIDENT, *flags], folder)
        parallel = init_parallel(config.device)
        trainer = Trainer(resolve_inputs(config, parallel), parallel, claim_run_folder(config, parallel))
        variants = Variants(trainer, size, each, options)
        trainer.observers.append(variants)
        variants.use(VARIANTS[0])
        with trainer.signals:
            trainer._train()
        trainer.metrics.close()
    variants.report()


class Variants:
    """An observer of steps that switches the variant after each segment and collects the rows."""

    def __init__(self, trainer: Any, size: int, each: int, options: argparse.Namespace):
        self.trainer, self.size, self.options = trainer, size, options
        self.segments = [(name, -1, COMPILING) for name in VARIANTS]
        for repeat in range(options.repeats):  # every second repeat in the opposite order
            order = VARIANTS[:: 1 - 2 * (repeat % 2)]
            self.segments += [(name, repeat, each) for name in order]
        self.seconds: list[float] = []
        self.rows: list[dict] = []
        self.kernels: dict[str, str] = {}
        self.profile: Any = None
        visual: Any = trainer.engine.module.visual
        self.compiled = {
            "add_positions": visual.add_positions,
            "layer_norm": visual.ln_pre.layer_norm,
            "patch_rows": getattr(visual.conv1, "patch_rows", None),
        }
        self.attends = {name: _attend_of(name, trainer.engine.module) for name in VARIANTS}
        self.runs = {name: _compiled_block(name, size) for name in VARIANTS}
        self.runs["eager embedding"], self.attends["eager embedding"] = self.runs["blocks"], self.attends["blocks"]

    def use(self, name: str) -> None:
        """Switch the image tower to a variant."""
        visual: Any = self.trainer.engine.module.visual
        torch.backends.cuda.enable_flash_sdp(name != "cudnn")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        for block in visual.transformer.resblocks:
            block.attn.attend, block.run = self.attends[name], self.runs[name]
        eager = {"add_positions": add_positions, "layer_norm": transformer.layer_norm, "patch_rows": patch_rows}
        chosen = eager if name == "eager embedding" else self.compiled
        visual.add_positions, visual.ln_pre.layer_norm = chosen["add_positions"], chosen["layer_norm"]
        if hasattr(visual.conv1, "patch_rows"):
            visual.conv1.patch_rows = chosen["patch_rows"]
        torch.cuda.reset_peak_memory_stats()

    def after_step(self, step: Any) -> None:
        name, repeat, length = self.segments[0]
        self.seconds.append(step.seconds)
        if repeat < 0 and len(self.seconds) == length - 1:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if len(self.seconds) < length:
            return
        if repeat < 0:
            self.profile.stop()
            self.kernels[name] = _attention_kernels(self.profile)
            print(f"{self.options.models[0]} {name}: {self.seconds} s; {self.kernels[name]}", flush=True)
        else:
            self._add_row(name, repeat, step.loss)
        self.segments.pop(0)
        self.seconds = []
        if self.segments:
            self.use(self.segments[0][0])

    def _add_row(self, name: str, repeat: int, loss: float) -> None:
        seconds = statistics.median(self.seconds[SKIPPED:])
        batch = self.trainer.batch
        row = {
            "model": self.options.models[0], "micro_batch": self.size, "micro_batches": batch.num_micro_batches,
            "variant": name, "repeat": repeat, "samples_per_second": batch.global_batch_size / seconds,
            "step_seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": loss,
            "kernels": self.kernels[name],
        } | hardware(self.options.commit)  # fmt: skip
        append(self.options.csv, [row], COLUMNS)
        self.rows.append(row)
        every = [round(s, 4) for s in self.seconds]
        print(
            f"{row['model']} {name:<16} repeat {repeat} {row['samples_per_second']:9.1f} samples/s {seconds:.4f} s "
            f"{row['peak_gib']:6.1f} GiB, all {every}",
            flush=True,
        )

    def report(self) -> None:
        """Print the median of each variant."""
        rates: dict[str, float] = {}
        for name in VARIANTS:
            own = [row["samples_per_second"] for row in self.rows if row["variant"] == name]
            rates[name] = statistics.median(own)
            print(
                f"{self.options.models[0]} {name:<16} median {rates[name]:9.1f} samples/s, "
                f"{rates[name] / rates['blocks'] - 1:+.2%} of blocks, range {min(own):.1f} - {max(own):.1f}",
                flush=True,
            )


def _attend_of(name: str, model: Any) -> Any:
    if name == "blocks":
        return partial(attend_by_triton, longest=1 + model.cfg.vision_cfg.num_patches)
    return transformer.attend


def _compiled_block(name: str, size: int) -> Any:
    """Return a compiled block with a code object of its own, so that no variant uses another's graph."""
    eager = transformer.compute_block
    code = eager.__code__.replace(co_name=f"compute_block_{name.replace(' ', '_')}")
    own = types.FunctionType(code, eager.__globals__)
    own.__kwdefaults__ = eager.__kwdefaults__
    return _for_sizes(torch.compile(own, dynamic=False), eager, {size})


def _attention_kernels(profile: Any) -> str:
    """Return the names and milliseconds of the step's attention kernels."""
    words = ("attention", "attn", "fmha", "flash", "sdpa", "cudnn_generated", "_forward", "_backward", "_delta")
    found = {
        event.key: event.self_device_time_total / 1e3
        for event in profile.key_averages()
        if event.self_device_time_total > 0 and any(word in event.key.lower() for word in words)
    }
    longest = sorted(found.items(), key=lambda item: -item[1])[:6]
    return "; ".join(f"{key[:60]} {milliseconds:.1f} ms" for key, milliseconds in longest)


if __name__ == "__main__":
    main()
