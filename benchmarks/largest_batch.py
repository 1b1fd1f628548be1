"""Try which global batches fit (the paper's Tables 1 and 2): `python -m benchmarks.largest_batch --gpus 4 --at B ...`

A trial is one step of the trainer on synthetic images, in processes of its own. The allocator limits each process to
--memory-gb of GPU memory. The batches are tried in ascending order, up to the first that does not fit, for each --loss
and each --pixels. Each trial is a CSV row. A trial that fails for another reason than GPU memory ends the command.
`python -m infcl.plan` estimates the largest batch.

    --pixels gpu     cache pixels on the GPU between the passes (as in the paper without data offload; here as uint8)
    --pixels host    cache pixels in host memory, and read those that do not fit twice (the paper's "data offload")

Steps are abridged. Everything that grows with the batch has its full size: cached pixels, tokens, features, the loss of
all samples over all ranks, feature gradients. Micro-batches between the first and the last of a pass get random unit
vectors as features and no backward: encoding them would take hours, and no more memory than the others.

Other flags are pretrain_clip.py's.
"""

import argparse
import json
import re
import sys
from importlib import metadata
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.clock import hardware
from benchmarks.processes import exit_on_sigterm, reason, run
from benchmarks.rows import append, parser_of_rows
from benchmarks.step import command, config_of, shared_folder, trained
from infcl.loss.contrastive import LOSSES
from infcl.parallel import destroy_parallel, init_parallel
from infcl.report import read_metrics
from infcl.train.trainer import Trainer

COLUMNS = (
    "model", "gpus", "memory_gb", "pixels", "loss", "precision", "checkpointing", "micro_batch", "global_batch",
    "fits", "peak_gib", "seconds_loss", "step_seconds", "device", "torch", "triton", "deepspeed", "commit", "said",
)  # fmt: skip
RESULT = "RESULT "


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, trainer_flags = _parser().parse_known_args(arguments)
    if options.trial is not None:
        measure(options, trainer_flags)
        return 0
    unit = options.gpus * options.batch_size
    if odd := [batch for batch in options.at if batch % unit]:
        raise SystemExit(f"--at {odd[0]} is no multiple of {options.gpus} GPUs x --batch-size {options.batch_size}")
    exit_on_sigterm("benchmarks.largest_batch")
    fitting = 0
    for loss, pixels in product(options.loss, options.pixels):
        for batch in sorted(options.at):
            if not trial(options, arguments, loss, pixels, batch):
                break
            fitting += 1
    return 0 if fitting else 1


def trial(options: argparse.Namespace, arguments: list[str], loss: str, pixels: str, batch: int) -> bool:
    """Run a step in processes of its own, and report it. Return whether it fits.

    Raises:
        SystemExit: it failed for another reason than memory.
    """
    row: dict[str, Any] = {"model": options.model, "gpus": options.gpus, "memory_gb": options.memory_gb}
    row |= {"pixels": pixels, "loss": loss, "precision": options.precision, "micro_batch": options.batch_size}
    row |= {"checkpointing": int(not options.no_checkpointing), "global_batch": batch}
    started = command(options.gpus, [*arguments, "--trial", loss, pixels, str(batch)], "benchmarks.largest_batch")
    failure, output = run(started, options.time_out)
    results = [line for line in output.splitlines() if line.startswith(RESULT)]
    cause = memory_cause(output)
    if not results and cause is None:
        what = f"{loss}, pixels {pixels}, {batch:,} samples: {failure}, for another reason than memory"
        raise SystemExit(f"{output[-3000:]}\n{what}: {reason(output)[0]}")
    row |= {"fits": 1} | json.loads(results[0][len(RESULT) :]) if results else {"fits": 0, "said": str(cause)[:200]}
    append(options.csv, [row | hardware(options.commit) | {"deepspeed": metadata.version("deepspeed")}], COLUMNS)
    shown = f"{row['peak_gib']:.1f} GiB" if row["fits"] else "does not fit"
    print(f"{loss:>10} {pixels:>5} {batch:>12,} samples: {shown}", flush=True)
    return bool(row["fits"])


def memory_cause(output: str) -> str | None:
    """Return the line of a failed trial's output that reports exhausted GPU memory; None: another cause."""
    lines = (line.strip() for line in output.splitlines())
    return next(
        (line for line in lines if re.search(r"OutOfMemoryError|CUDA\b.*out of memory|_ALLOC_FAILED", line)), None
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_rows(__doc__)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=80.0, help="1e9 bytes that each process may allocate")
    parser.add_argument("--batch-size", type=int, default=256, help="micro-batch")
    parser.add_argument("--pixels", choices=("gpu", "host"), nargs="+", default=["gpu"])
    parser.add_argument("--loss", choices=LOSSES, nargs="+", default=["inf_cl"])
    parser.add_argument("--precision", choices=("bf16", "amp_bf16", "fp32"), default="bf16")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--at", type=int, nargs="+", default=[], help="batches to try, in samples")
    parser.add_argument("--time-out", type=float, default=900.0, help="seconds of a trial")
    parser.add_argument("--trial", nargs=3, default=None, help=argparse.SUPPRESS)  # in the processes of a trial
    return parser


# ---- one trial, in its processes ----


class AbridgedTrainer(Trainer):
    """A trainer that encodes only the first and the last micro-batches of a pass."""

    real = 2  # number of micro-batches at each end of a pass that are encoded

    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **options)
        self.encode, self.backward = self.engine.encode, self.engine.backward
        vars(self.engine).update(encode=self._encode, backward=self._backward)

    def train_step(self, micro_batches):
        self.encoded = 0
        return super().train_step(micro_batches)

    def _encode(self, **micro_batch: torch.Tensor) -> dict:
        """Encode a micro-batch of pass 1 or, after all of that, of pass 2; the latter begins at 0 again."""
        index, self.encoded = self.encoded % self.batch.num_micro_batches, self.encoded + 1
        return self.encode(**micro_batch) if self._is_real(index) else self._stand_in(micro_batch)

    def _backward(self, surrogate: torch.Tensor, is_last: bool) -> None:
        if surrogate.requires_grad:
            self.backward(surrogate, is_last)

    def _is_real(self, index: int) -> bool:
        """Return whether a micro-batch is encoded.

        The last ones keep their graphs (cached activations). The last one before them is replayed and ends the step.
        """
        cached = self.batch.num_micro_batches - max(1, self.resident)
        return index < self.real or index >= cached - self.real

    def _stand_in(self, micro_batch: dict) -> dict[str, torch.Tensor]:
        device = self.parallel.device
        shape = (len(micro_batch.get("text_ends", micro_batch["texts"])), self.model_config.embed_dim)
        features = {
            name: F.normalize(torch.randn(shape, device=device), dim=1) for name in ("image_features", "text_features")
        }
        scalars = {"logit_scale": 2.659, "logit_bias": self.model_config.init_logit_bias}
        return features | {
            n: torch.full([1], value, device=device) for n, value in scalars.items() if value is not None
        }


def measure(options: argparse.Namespace, trainer_flags: list[str]) -> None:
    """Run the step of --trial on this rank; rank 0 prints its peak memory and times."""
    loss, pixels, batch = options.trial[0], options.trial[1], int(options.trial[2])
    flags = ["--model", options.model, "--precision", options.precision, "--loss", loss]
    flags += ["--batch-size", str(options.batch_size), "--global-batch-size", str(batch)]
    flags += ["--pixel-cache-gb", "gpu" if pixels == "gpu" else "auto", "--compile-blocks", "off"]
    flags += ["--pack-captions", "off", "--skip-memory-check"]  # a batch must fit with the longest captions too
    flags += [] if options.no_checkpointing else ["--grad-checkpointing"]
    with shared_folder() as folder:
        config = config_of("1", {}, 1, [*flags, *trainer_flags], folder)
        parallel = init_parallel(config.device)
        if parallel.device.type == "cuda":
            total = torch.cuda.get_device_properties(parallel.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gb * 1e9 / total), parallel.device)
        trainer, peak = trained(AbridgedTrainer, config, parallel)
        if parallel.rank == 0:
            record = read_metrics(trainer.run.metrics, "train")[0]
            seconds = batch / record["samples_per_second"]
            row = {"peak_gib": peak, "seconds_loss": record["seconds_loss"], "step_seconds": seconds}
            print(RESULT + json.dumps(row), flush=True)
    destroy_parallel()


if __name__ == "__main__":
    raise SystemExit(main())
