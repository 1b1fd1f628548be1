"""Evaluate weights: `python -m infcl.evaluate --checkpoint RUN --task zeroshot --data imagenet/val ...`

    join the ranks (torchrun, deepspeed, srun; or one process) -> load -> run the task on all ranks -> table, JSON line

Exit codes: 0 done, 2 a usage error (reported in one line).
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from infcl.checkpoint.run_folder import run_of
from infcl.config import CAPTIONS, LOSS_NAMES, OneLineParser, TrainConfig, aligned, counted
from infcl.config.redaction import redact_output, redacted
from infcl.data.evaluation import RESIZES, EvalConfig
from infcl.evaluate.load import load_model
from infcl.evaluate.tasks import RetrievalTask, ZeroShotTask
from infcl.evaluate.validation import ValidationLoss
from infcl.loss.matryoshka import check_widths
from infcl.models import CLIP
from infcl.models.packing import texts_for_model
from infcl.parallel import Parallel, destroy_parallel, init_parallel, read_environment, report_mistake
from infcl.parallel.process import end_process

_READING = (  # flags of a run that are taken over
    "image_key", "text_key", "json_text_key", "captions",
    "csv_separator", "csv_img_key", "csv_caption_key", "csv_img_root",
)  # fmt: skip
PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    redact_output()
    args = _parser().parse_args(arguments)
    rank = read_environment()[0]
    try:
        parallel = init_parallel(args.device, timeout_minutes=args.dist_timeout)
        result = evaluate(args, parallel)
    except ValueError as error:
        return report_mistake("infcl.evaluate", error)
    if rank == 0:
        line, run = redacted(json.dumps(result)), run_of(Path(args.checkpoint))
        print(table(result), *([] if args.out else [line]), sep="\n", flush=True)
        if run is not None and (error := _append(line, run.evaluations)):
            print(f"{error}: a report about {run.root} will not show these results", file=sys.stderr, flush=True)
        if args.out and (error := _append(line, args.out)):
            print(line, flush=True)  # keep the results of a long evaluation
            return report_mistake("infcl.evaluate", ValueError(f"--out {error}"))
    destroy_parallel(parallel)
    return 0


def _append(line: str, path: str | Path) -> str:
    """Append a line to a file; return why it could not be written, or ""."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            print(line, file=file, flush=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def evaluate(args: argparse.Namespace, parallel: Parallel) -> dict[str, object]:
    """Run the task and return its inputs and metrics as one record. Collective: all ranks return the same.

    Raises:
        ValueError: the options, the weights or the data are invalid.
    """
    if args.batch_size < 1:
        raise ValueError(f"--batch-size {args.batch_size} must be greater than 0")
    named = {"model": args.model, "tokenizer": args.tokenizer, "ema": args.ema}
    clip, tokenizer, averaged = load_model(args.checkpoint, device=parallel.device, **named)
    run = run_of(Path(args.checkpoint))
    flags = TrainConfig() if run is None else run.config()
    if args.data != flags.val_data:
        flags = dataclasses.replace(flags, csv_img_root=None)  # another table's
    given = {name: value for name in _READING if (value := getattr(args, name)) is not None}
    config = EvalConfig.of(dataclasses.replace(flags, **given), args.data, clip.cfg, resize=args.image_resize)
    widths = flags.matryoshka_widths if args.widths is None else args.widths
    if widths:
        check_widths(widths, dim=clip.cfg.embed_dim, name="--widths")
    common = {"tokenizer": tokenizer, "batch_size": args.batch_size, "widths": widths}
    if args.task == "zeroshot":
        files = {name: getattr(args, f"zeroshot_{name}") for name in ("classnames", "templates", "classes")}
        task = ZeroShotTask(config, **files, **common)
    else:
        loss, size, ranks = None, args.loss_batch_size, parallel.dp_size
        if size is not None:
            if size < 1 or size % ranks:
                raise ValueError(f"--loss-batch-size {size} is not a multiple of {ranks} ranks")
            loss = ValidationLoss(args.loss, "auto", size // ranks)
        task = RetrievalTask(config, loss=loss, **common)
    task.check()
    started = time.perf_counter()
    metrics = task.run(encoder(clip, args.precision), parallel)
    seconds = round(time.perf_counter() - started, 2)
    about = {"checkpoint": str(args.checkpoint), "task": args.task, "data": args.data, "precision": args.precision}
    about |= {} if averaged is None else {"ema": averaged}
    about |= {**task.about, "image_resize": args.image_resize, "world_size": parallel.world_size, "seconds": seconds}
    return about | {"metrics": metrics}


def encoder(clip: CLIP, precision: str) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the function (images on the device, texts on the host) -> features, under autocast for `precision`."""
    dtype, device, cfg = PRECISIONS[precision], clip.logit_scale.device, clip.cfg.text_cfg
    prepare = texts_for_model(cfg, pack=not cfg.why_unpackable)

    def encode(images: torch.Tensor | None, texts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        given = {} if texts is None else {name: value.to(device) for name, value in prepare(texts).items()}
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return clip(images, **given)

    return encode


def table(result: dict) -> str:
    """Format the result as aligned lines for a terminal: shares in percent, other values as numbers."""
    about = ("checkpoint", "data", "classes", "prompts", "prompt", "prompt_source")
    rows = [(name.replace("_", " "), str(result[name])) for name in about if name in result]
    for name, value in result["metrics"].items():
        is_share = name.endswith(("top1", "top5", "_r1", "_r5", "_r10"))
        rows.append((name.replace("_", " "), f"{100 * value:.2f} %" if is_share else f"{value:,.6g}"))
    rows.append(("seconds", f"{result['seconds']:,.1f} on {counted(result['world_size'], 'rank')}"))
    return f"\n{aligned(rows)}\n"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m infcl.evaluate", description="Zero-shot classification and retrieval, on all ranks."
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="run, checkpoint, export, open_clip or CLIPModel folder, or a weights file")
    add(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="the averaged weights of a run or checkpoint, or not [if it has them (--ema-decay)]",
    )
    add("--task", required=True, choices=("zeroshot", "retrieval"))
    add("--data", required=True, help="shards, a folder of class folders, or a .csv or .jsonl of images and captions")
    add("--model", help="model config of a bare weights file")
    add("--tokenizer", help="sentencepiece .model or tokenizer folder [that of the weights, else CLIP's BPE]")
    names = "a class name per line, LABEL<TAB>name, or imagenet [classnames.txt with the data]"
    add("--zeroshot-classnames", help=names)
    add("--zeroshot-templates", help="a prompt per line, {} is the name, or imagenet [templates.txt with the data]")
    add("--zeroshot-classes", help="the classes that compete, for ImageNet-A, -R, -O, ObjectNet and the like [all]")
    add("--image-key", help="extensions of the image member [the run's; jpg;png;jpeg;webp]")
    add("--text-key", help="extensions of the caption member [the run's; txt]")
    add("--json-text-key", help="take captions from this key of the json member [the run's]")
    add("--csv-separator", help="of a .csv or .tsv: between columns [the run's; tab]")
    add("--csv-img-key", help="its column of image paths [the run's; filepath]")
    add("--csv-caption-key", help="its column of captions [the run's; title]")
    add("--csv-img-root", help="where its relative image paths start [its folder]")
    add("--captions", choices=CAPTIONS, help="lines: each line of a text member is a caption [the run's; one]")
    add("--loss-batch-size", type=int, help="report the loss of global batches of this size too (retrieval)")
    add("--loss", choices=LOSS_NAMES, default="inf_cl", help="which loss that is [inf_cl]")
    add("--widths", type=int, nargs="+", metavar="N", help="metrics of prefixes of these widths too [the run's]")
    add("--image-resize", choices=RESIZES, default="torch", help="pil: the pixels of published figures [torch]")
    add("--batch-size", type=int, default=64, help="images per rank and forward [64]")
    add("--precision", choices=tuple(PRECISIONS), default="fp32")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--dist-timeout", type=float, default=30.0, help="minutes after which a hung collective ends the run [30]")
    add("--out", help="append the JSON line to this file instead of printing it; RUN/evaluations.jsonl has it too")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    end_process(main())
