"""Which tensor-parallel size and ZeRO stage: memory and samples/s of whole steps on the GPUs of one host.

    python -m benchmarks.tensor_parallel --gpus 8 --models bigG,5B --sizes 1,2,4,8 --stages 1,3 --csv FILE

Every setting runs in processes of its own (DeepSpeed's engine is never freed, so a second one's peak would hold the
first) with a time limit; what runs out of memory or time becomes a row that says so. A step is the trainer's: gradient
cache over --accum-freq micro-batches of --batch-sizes pairs per data-parallel rank, the ring over all ranks, AdamW,
amp_bf16, compiled blocks, random pixels, the trainer's synthetic captions. samples/s: median of --repeats (at least 3)
steps after two, over all GPUs; loss: of the fifth step, whatever --repeats; peak memory: torch's, largest rank, of the
steps after the first.

Models: names of infcl/models/configs, or
    bigG  ViT-bigG-14 with 16 text heads instead of 20, which 8 ranks cannot share; sizes and flops are the same
    5B    an image tower of 5.0 B (width 3072, 44 layers, 24 heads) with a text tower of 0.4 B

In the CSV, reduce_bucket_size and overlap_comm (0, 1) are the preset's; rows without them have DeepSpeed's own bucket
(5e8), and 1. The lever "none" is the trainer's way at that commit, captions whole; "packed captions" is --pack-captions
on; others ("graphs", "one block a graph", "halves") are of what was tried (dev/log/2026-11.md). text_share:
places that the text tower computes, of whole captions'. A peak that is missing was of a second engine in its process.
Rows of the commits 96af64e to 68ce065 hold the loss of their last step, the (2 + --repeats)th, which was the fifth or
sixth (ViT-L-14, 128 pairs x 2: 5.21 in the fifth, 4.88 in the sixth), so they do not compare with newer ones. Up to
3d6d09a captions were random ids in all places, so losses do not compare with later ones either.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rows import append
from benchmarks.spawn import on_ranks
from benchmarks.step import end_process
from infcl.checkpoint.run_folder import git_commit

ROOT = Path(__file__).parent.parent
COLUMNS = (
    "model", "gpus", "tensor_parallel", "sequence_parallel", "zero_stage", "checkpointing", "batch_size", "accum_freq",
    "compiled", "lever", "text_share", "attention", "status", "samples_per_second", "step_ms", "loss", "peak_gib",
    "mfu", "parameters_m", "reduce_bucket_size", "overlap_comm", "device", "torch", "commit",
)  # fmt: skip
RESULT = "RESULT "
WARM_UP, LOSS_STEP = 2, 5  # steps are on the same pairs, so the loss falls with each: a row's is of one step


def main() -> None:
    arguments = _parse()
    if arguments.one:
        setting = json.loads(arguments.one)
        on_ranks(_rank, setting["gpus"], setting)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and its processes end with this one
    print(f"{'model':>9}  T  SP ZeRO    m  samples/s       ms  peak GiB    MFU", flush=True)
    for setting in settings(arguments):
        row = setting | _in_child(setting, arguments.timeout)
        _report(row | {"commit": arguments.commit or git_commit()}, arguments.csv)


def settings(arguments: argparse.Namespace) -> list[dict]:
    """What is measured, in order; sequence parallelism only where T > 1."""
    return [
        {
            "model": model, "gpus": arguments.gpus, "tensor_parallel": size, "sequence_parallel": sequence == "on",
            "zero_stage": stage, "checkpointing": arguments.grad_checkpointing, "batch_size": batch_size,
            "accum_freq": arguments.accum_freq, "compile_blocks": arguments.compile_blocks,
            "repeats": arguments.repeats, "device": arguments.device,
            "lever": "packed captions" if packed == "on" else "none",
        }
        for model in arguments.models.split(",")
        for size in map(int, arguments.sizes.split(","))
        for sequence in (arguments.sequence_parallel.split(",") if size > 1 else ["off"])
        for stage in map(int, arguments.stages.split(","))
        for batch_size in map(int, arguments.batch_sizes.split(","))
        for packed in arguments.pack_captions.split(",")
    ]  # fmt: skip


def model_config(name: str):
    from infcl.models import TextConfig, VisionConfig, load_model_config

    if name == "bigG":
        cfg = load_model_config("ViT-bigG-14")
        return dataclasses.replace(cfg, text_cfg=dataclasses.replace(cfg.text_cfg, heads=16))
    if name == "5B":
        return dataclasses.replace(
            load_model_config("ViT-bigG-14"),
            embed_dim=1024,
            vision_cfg=VisionConfig(layers=44, width=3072, head_width=128, patch_size=14),
            text_cfg=TextConfig(width=1024, heads=16, layers=24),
        )
    return load_model_config(name)


# ---- one setting, in a process of its own ----


def _rank(rank: int, setting: dict) -> None:
    try:
        measured = _measure(setting)
        if rank == 0:
            print(RESULT + json.dumps(measured), flush=True)
    except torch.OutOfMemoryError:
        print(RESULT + json.dumps({"status": "out of memory"}), flush=True)
        os._exit(1)  # the other ranks wait for this one
    os._exit(0)  # nothing to clean up that the end of the process does not


def _measure(setting: dict) -> dict:
    from infcl.config import TrainConfig, may_pack, resolve
    from infcl.engine.engine import Engine
    from infcl.models import CLIP
    from infcl.models.attention import towers_with_kernel
    from infcl.models.captions import texts_of_part
    from infcl.parallel import init_parallel, max_over, mean_over, seed_everything
    from infcl.step.grad_cache import grad_cache_step
    from infcl.train.build import build_loss, split_model
    from infcl.train.compile import prepare_blocks
    from infcl.train.diagnostics import utilisation

    config = TrainConfig(
        pack_captions="on" if setting["lever"] == "packed captions" else "off",
        dataset_type="synthetic", train_num_samples=1, deepspeed_config=f"ds_configs/zero{setting['zero_stage']}.json",
        tensor_parallel_size=setting["tensor_parallel"], sequence_parallel=setting["sequence_parallel"],
        compile_blocks=setting["compile_blocks"], accum_freq=setting["accum_freq"], batch_size=setting["batch_size"],
    )  # fmt: skip
    parallel = init_parallel(setting["device"], timeout_minutes=5)
    if setting["tensor_parallel"] > 1:
        from megatron_patches.groups import init_tensor_parallel

        parallel = init_tensor_parallel(parallel, setting["tensor_parallel"], on_host=may_pack(config))
    spec = resolve(config, device=parallel.device.type, ranks=parallel.dp_size, hosts=parallel.hosts)
    batch = spec.batch
    cfg, on_gpu = model_config(setting["model"]), parallel.device.type == "cuda"
    seed_everything(0)
    with parallel.device:
        model = CLIP(cfg, activation_checkpointing=setting["checkpointing"])
    parameters = sum(p.numel() for p in model.parameters())
    split_model(model, config, parallel)
    compiled = prepare_blocks(model, spec, parallel)
    engine = Engine(model, spec, parallel)
    loss, drawn, texts = build_loss(spec, parallel), _micro_batches(cfg, batch, parallel), []
    texts_of = texts_of_part(cfg.text_cfg, parallel, pack=spec.packs_captions)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for repeat in range(WARM_UP + setting["repeats"]):
        if on_gpu and repeat == 1:
            torch.cuda.reset_peak_memory_stats()  # what compiling took
        dist.barrier()
        started = time.perf_counter()
        texts = [
            {name: value.to(parallel.device, non_blocking=True) for name, value in texts_of(part).items()}
            for _, part in drawn
        ]
        micro_batches = [{"images": images} | own for (images, _), own in zip(drawn, texts)]
        output = grad_cache_step(
            micro_batches,
            encode=lambda micro_batch: engine.encode(**micro_batch),
            loss=loss,
            backward=engine.backward,
            seeds=range(batch.num_micro_batches),
            scalar_values=engine.scalar_values,
        )
        engine.step(1e-5)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(output.loss)
    median = statistics.median(seconds[WARM_UP:])
    rate = batch.global_batch_size / median
    share = sum(own["texts"].numel() for own in texts) / (batch.rank_batch_size * cfg.text_cfg.context_length)
    mfu = utilisation(cfg, parallel.device, engine.precision)(rate / parallel.world_size, share)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    peak = max_over(dist.group.WORLD, [peak], parallel.device)[0]
    return {
        "status": "ok", "compiled": compiled, "samples_per_second": round(rate, 2), "step_ms": round(1e3 * median, 1),
        "loss": round(float(mean_over(engine.dp_group, losses[LOSS_STEP - 1])), 4), "text_share": round(share, 4),
        "attention": "triton" if towers_with_kernel(model) else "torch",
        "peak_gib": round(peak / 2**30, 2), "mfu": None if mfu is None else round(mfu, 4),
        "parameters_m": round(parameters / 1e6, 1), "torch": torch.__version__, "zero_stage": engine.zero_stage,
        "reduce_bucket_size": spec.zero_optimization.get("reduce_bucket_size"),
        "overlap_comm": int(spec.zero_optimization.get("overlap_comm", False)),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }  # fmt: skip


def _micro_batches(cfg, batch, parallel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random pixels on the device, the same for tensor-parallel ranks; this rank's part of the captions, pinned."""
    from infcl.data.synthetic import Captions

    generator = torch.Generator().manual_seed(1 + parallel.dp_rank)
    size, (m, text) = cfg.vision_cfg.image_size, (batch.micro_batch_size, cfg.text_cfg)
    captions = Captions(text.context_length, text.vocab_size, text.end_id, text.pad_id)
    drawn = []
    for _ in range(batch.num_micro_batches):
        images = torch.randint(256, (m, 3, size, size), dtype=torch.uint8, generator=generator)
        part = captions.draw(m, generator).chunk(parallel.tp_size)[parallel.tp_rank].contiguous()
        drawn.append((images.to(parallel.device), part.pin_memory() if parallel.device.type == "cuda" else part))
    return drawn


# ---- the parent ----


def _in_child(setting: dict, timeout: float) -> dict:
    """What the setting's processes reported, or a status that says why there is nothing."""
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--one", json.dumps(setting)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    status = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:  # Ctrl-C and SIGTERM too: its processes end with this one
        output = end_process(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        status = f"no result in {timeout:.0f} s"
    for line in output.splitlines():
        if line.startswith(RESULT):
            return json.loads(line[len(RESULT) :])
    print(output[-3000:], flush=True)
    return {"status": status or f"failed with exit code {process.returncode}"}


def _report(row: dict, path: Path | None) -> None:
    head = f"{row['model']:>9} {row['tensor_parallel']:>2} {'on' if row['sequence_parallel'] else '-':>3} "
    head += f"{row['zero_stage']:>4} {row['batch_size']:>4} "
    if row["status"] == "ok":
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.3f}"
        head += f"{row['samples_per_second']:>10.1f} {row['step_ms']:>8.0f} {row['peak_gib']:>9.1f} {mfu:>6}"
    else:
        head += row["status"]
    print(head if row["lever"] == "none" else f"{head}  {row['lever']}", flush=True)
    append(path, [row], COLUMNS)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--models", default="bigG,5B")
    parser.add_argument("--sizes", default="1,2,4,8", help="tensor-parallel sizes")
    parser.add_argument("--stages", default="1,3", help="ZeRO stages")
    parser.add_argument("--sequence-parallel", default="on", help="on, off or on,off; of sizes above 1")
    parser.add_argument("--pack-captions", default="off", help="on, off or on,off")
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--compile-blocks", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--batch-sizes", default="64", help="pairs per micro-batch")
    parser.add_argument("--accum-freq", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps, 3 or more")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one setting may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--csv", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeats < LOSS_STEP - WARM_UP:
        parser.error(f"--repeats {arguments.repeats} is below {LOSS_STEP - WARM_UP}: a row has the fifth step's loss")
    return arguments


if __name__ == "__main__":
    main()
