"""open_clip's towers on the same GPU: what benchmarks.step --peer measures. open_clip comes from a checkout."""

import argparse
import statistics
import sys

import torch

from benchmarks.clock import hardware, library_tflops, timed
from infcl.config import parse_args
from infcl.models.config import load_model_config
from infcl.models.flops import forward_flops


def measure_open_clip(options: argparse.Namespace, trainer_flags: list[str]) -> None:
    """Rows of open_clip under bf16 autocast: forward, forward + backward, and the gradient cache that they make."""
    from benchmarks.step import HEADER, report

    sys.path.insert(0, str(options.peer / "src"))
    import open_clip

    given = ["--dataset-type", "synthetic", "--train-num-samples", "1", "--model", "ViT-L-14"]
    config = parse_args([*given, *trainer_flags])
    rate = library_tflops()
    forward = sum(forward_flops(load_model_config(config.model)).values())
    print(HEADER, flush=True)
    for blocks in ("eager", "compiled"):
        model = open_clip.create_model(config.model, precision="amp_bf16", device="cuda").train()
        model.set_grad_checkpointing(config.grad_checkpointing)
        run = torch.compile(model) if blocks == "compiled" else model
        seconds, peak = _seconds(model, run, config.batch_size)
        times = {"forward": seconds[0], "forward + backward": seconds[1], "gradient cache": sum(seconds)}
        work = {"forward": 1, "forward + backward": 3 + config.grad_checkpointing}
        for name, time in times.items():
            per_second = config.batch_size / time
            row = {"label": f"open_clip {blocks} {name}", "gpus": 1, "model": config.model, "blocks": blocks}
            row |= {"precision": "amp_bf16", "micro_batch": config.batch_size, "steps": 10, "peak_gib": peak}
            row |= {"checkpointing": config.grad_checkpointing, "library_tflops": rate}
            row |= {"samples_per_second": per_second, "samples_per_second_per_gpu": per_second, "step_seconds": time}
            row["mfu"] = min(3, work.get(name, 3)) * forward * per_second / rate / 1e12
            row["hfu"] = work.get(name, sum(work.values())) * forward * per_second / rate / 1e12
            report(row | hardware(options.commit), options.csv)


def _seconds(model, run, size: int) -> tuple[tuple[float, float], float]:
    """((forward, forward + backward), peak GiB) of a micro-batch; median of ten."""
    side, length = model.visual.image_size, model.context_length
    side = side[0] if isinstance(side, tuple) else side
    images = torch.randn(size, 3, side, side, device="cuda")
    texts = torch.randint(1, model.vocab_size - 1, (size, length), device="cuda")

    def encode():
        with torch.autocast("cuda", torch.bfloat16):
            output = run(images, texts)
        return output["image_features"] if isinstance(output, dict) else output[0], (
            output["text_features"] if isinstance(output, dict) else output[1]
        )

    @torch.no_grad()
    def forward():
        encode()

    def both():
        image, text = encode()
        (image.float().square().sum() + text.float().sum()).backward()
        model.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    one, two = (statistics.median(timed(f, 10, warm_up=4)) / 1000 for f in (forward, both))
    return (one, two), torch.cuda.max_memory_allocated() / 2**30
