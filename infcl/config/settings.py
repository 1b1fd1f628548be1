"""Settings of a run as one frozen dataclass: its fields are the flags, their defaults and their help.

Flag names and meanings are open_clip's where it has the flag, else DeepSpeed's or Megatron's.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infcl.config.precision import PRECISIONS

AUTO_WORKERS = -1
LOSS_NAMES = ("inf_cl", "clip", "open_clip", "disco", "siglip")
AUGMENTATIONS = ("scale", "ratio", "hflip", "color_jitter", "color_jitter_prob", "gray_scale_prob", "scaled_decode")
CAPTIONS = ("one", "lines")
SCHEDULES = ("cosine", "const", "const-cooldown")
OPTIMIZERS = ("adamw", "adamw8bit", "lion", "lamb", "adafactor")
REPORT_TO = ("tensorboard", "wandb", "all", "none")
_SPELLINGS = {"amp_bfloat16": "amp_bf16", "pure_bf16": "bf16", "pure_fp16": "fp16"}
_SPELLINGS |= {"wandb,tensorboard": "all", "tensorboard,wandb": "all", "": "none"}


class JoinSources(argparse.Action):
    """Store the values of a flag as one '::' list, in which each is a source."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        vars(namespace)[self.dest] = "::".join(values)


def _number_or_auto(text: str, auto: int, least: int) -> int:
    """Parse a whole number of at least `least`; "auto" gives `auto`."""
    try:
        if text == "auto" or int(text) >= least:
            return auto if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    raise argparse.ArgumentTypeError(f"{text} must be at least {least}, or auto")


def _as_ours(text: str) -> str:
    """Return our value for open_clip's spelling of it."""
    return _SPELLINGS.get(text, text)


def _flag(group: str, default, help: str, bounds: str | None = None, **argparse_options):
    """Return a field with its group, one line of help, and the bounds of its values (a key of `checks.BOUNDS`)."""
    metadata = {"group": group, "help": help, "bounds": bounds, "argparse": argparse_options}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_data, _model, _loss = (partial(_flag, group) for group in ("data", "model", "loss"))
_optimisation, _system, _run = (partial(_flag, group) for group in ("optimisation", "system", "run"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. `None` means "not given"; the help states the default then."""

    train_data: str | None = _data(
        None,
        "training shards or tables: paths, {000..010} braces, folders, a '::' list, or @FILE with one per line",
        nargs="+",
        action=JoinSources,
    )
    val_data: str | None = _data(
        None, "image-text pairs for retrieval and the validation loss: shards, a .csv or .tsv, or a .jsonl"
    )
    zeroshot_data: str | None = _data(None, "class folders or labelled shards for zero-shot classification")
    zeroshot_classnames: str | None = _data(
        None, "file with one class name per line, or imagenet [classnames.txt next to the data]"
    )
    zeroshot_templates: str | None = _data(
        None, "file with one prompt per line and {} for the name, or imagenet [templates.txt next to the data]"
    )
    dataset_type: str = _data(
        "auto",
        "format of --train-data; auto: csv for .csv, .tsv and .jsonl files, else webdataset; streaming: shards read "
        "front to back (pipe: URLs), without exact order and resume",
        choices=("webdataset", "streaming", "csv", "synthetic", "auto"),
    )
    train_data_upsampling_factors: str | None = _data(
        None, "'a::b': how often an epoch uses each sample of the first, second, ... source of --train-data"
    )
    train_num_samples: int | None = _data(None, "samples per epoch (synthetic and streaming data need it)", "> 0")
    tokenizer: str | None = _data(
        None, "sentencepiece .model file, open_clip:MODEL for that model's own, or hf:NAME_OR_FOLDER"
    )
    workers: int = _data(
        AUTO_WORKERS,
        "data loader processes per rank; auto: from the node's cores, at most 8",
        type=partial(_number_or_auto, auto=AUTO_WORKERS, least=0),
    )
    aug_cfg: dict = _data({}, "augmentation, e.g. scale=0.9,1.0 ratio=0.75,1.33 hflip=0.5", nargs="*", metavar="K=V")
    max_bad_fraction: float = _data(0.01, "stop the run when more than this share of samples is unreadable", "[0, 1]")
    max_image_pixels: int = _data(25_000_000, "skip images with more pixels, without decoding them", "> 0")
    ignore_exif_orientation: bool = _data(False, "use images as stored, as open_clip does")
    image_key: str = _data("jpg;png;jpeg;webp", "extensions of the image member")
    text_key: str = _data("txt", "extensions of the caption member")
    json_text_key: str | None = _data(
        None, "take captions from this key of the json member ('a;b': the first key that has text)"
    )
    json_text_key_probs: list[float] = _data(
        [], "weights by which the order of the --json-text-key keys is drawn", nargs="*", metavar="P"
    )
    captions: str = _data(
        "one", "what a txt or a csv cell with several lines is: one caption, or a caption per line", choices=CAPTIONS
    )
    captions_per_image: int = _data(
        1,
        "captions drawn per image (of a list in json, or of --captions lines); above 1, all are positives of the "
        "image, which is encoded once",
        "> 0",
    )
    negatives_key: str | None = _data(
        None, "json key of hard-negative captions: adds one text per image to the softmax of the images"
    )
    duplicates: str = _loss(
        "negative",
        "other samples with the same image: negative; mask leaves them out, positive makes them positives; "
        "mask:caption, positive:key:NAME, ...: those with the same caption, or value of a json key",
        metavar="negative|mask[:BY]|positive[:BY]",
    )
    csv_separator: str = _data("\t", "csv: column separator")
    csv_img_key: str = _data("filepath", "csv: column of image paths")
    csv_caption_key: str = _data("title", "csv: column of captions")
    csv_img_root: str | None = _data(None, "csv: folder or URL where relative image paths start [that of the table]")
    index_cache: str | None = _data(
        None, "folder for indexes that cannot be stored next to their shards [~/.cache/infcl/index]"
    )
    allow_pipe_urls: bool = _data(False, "run the shell commands of pipe: URLs (streaming)")

    model: str = _model(
        "ViT-B-32", "name in infcl/models/configs, a JSON file in open_clip's schema, or open_clip:NAME_OR_FILE"
    )
    pretrained: str | None = _model(
        None, "start from the weights of a file, a folder, a run, a CLIPModel folder, or open_clip:TAG"
    )
    pretrained_image: str | None = _model(None, "as --pretrained, for the image tower only")
    pretrained_text: str | None = _model(None, "as --pretrained, for the text tower only")
    force_image_size: int | None = _model(None, "override the image size of the model config", "> 0")
    force_context_length: int | None = _model(None, "override the context length of the model config", "> 0")
    force_patch_dropout: float | None = _model(None, "override the patch dropout of the model config", "[0, 1)")
    image_mean: list[float] = _model([], "pixel mean per channel [preprocess_cfg]", nargs=3)
    image_std: list[float] = _model([], "pixel standard deviation [preprocess_cfg]", nargs=3)
    image_interpolation: str | None = _model(
        None,
        "interpolation in evaluation [preprocess_cfg]",
        choices=("bicubic", "bilinear", "random"),
    )
    image_resize_mode: str | None = _model(
        None,
        "how evaluation resizes images that are not square [preprocess_cfg]",
        choices=("shortest", "longest", "squash"),
    )
    lock_image: bool = _model(False, "freeze the image tower (LiT)")
    lock_image_unlocked_groups: int = _model(0, "leave the last n blocks of the locked image tower trainable", ">= 0")
    lock_text: bool = _model(False, "freeze the text tower")
    lock_text_unlocked_layers: int = _model(0, "leave the last n blocks of the locked text tower trainable", ">= 0")
    grad_checkpointing: bool = _model(False, "recompute each block's activations in the backward pass")

    loss: str = _loss("inf_cl", "loss over the global batch", choices=LOSS_NAMES)
    tile: str = _loss("auto", "kernel of the loss's tiles; auto: triton on a GPU", choices=("auto", "torch", "triton"))
    tile_dtype: str = _loss(
        "auto",
        "precision of the loss's matmuls; auto: that of --precision on a GPU, fp32 on a CPU",
        choices=("auto", "bf16", "fp16", "tf32", "fp32"),
    )

    false_negative_margin: float | None = _loss(
        None,
        "leave out negatives whose cosine exceeds that of the row's or column's match by more than this [none]",
        "[-2, 2]",
    )
    matryoshka_widths: list[int] = _loss(
        [], "train prefixes of the embeddings of these widths as embeddings too, ascending [none]", nargs="+"
    )
    matryoshka_weights: list[float] = _loss(
        [], "weights of the losses at --matryoshka-widths, whose mean is trained [equal]", nargs="+"
    )

    distill_model: str | None = _loss(
        None,
        "frozen teacher whose similarities the model learns: a run, an exported or CLIPModel folder; or a model as in "
        "--model, with --distill-pretrained [none]",
    )
    distill_pretrained: str | None = _loss(None, "weights of --distill-model: a file, or open_clip:TAG")
    teacher_key: str | None = _loss(
        None,
        "stored teacher: its embeddings of N numbers are the members KEY.NAME.npy of the shards, float16 [2, N] [none]",
        metavar="NAME:N",
    )
    teacher_scale: float | None = _loss(
        None, "factor of the teacher's cosines [that of --distill-model; 100 for --teacher-key]", "(0, 1e4]"
    )
    distill_weight: float = _loss(1.0, "weight of the distillation loss, which is added to --loss", "> 0")

    batch_size: int = _optimisation(
        64,
        "samples per GPU and micro-batch; auto: the largest size that fits into memory (needs --global-batch-size)",
        ">= 0",
        type=partial(_number_or_auto, auto=0, least=1),
    )
    accum_freq: int = _optimisation(1, "micro-batches per step; one loss over all of them (gradient cache)", "> 0")
    global_batch_size: int | None = _optimisation(
        None, "samples per step over all ranks; sets --accum-freq together with --batch-size", "> 0"
    )
    epochs: int = _optimisation(32, "passes over the training set", "> 0")
    steps: int | None = _optimisation(
        None, "length of training and schedule in optimizer steps, instead of --epochs", "> 0"
    )
    opt: str = _optimisation("adamw", "optimizer; see docs/howto/learning-rates.md", choices=OPTIMIZERS)
    lr: float = _optimisation(5e-4, "peak learning rate", "> 0")
    image_lr: float | None = _optimisation(None, "peak learning rate of the image tower [--lr]", "> 0")
    text_lr: float | None = _optimisation(None, "peak learning rate of the text tower [--lr]", "> 0")
    image_layer_decay: float | None = _optimisation(
        None, "layer-wise learning-rate decay of the image tower, per block from the top [1]", "(0, 1]"
    )
    text_layer_decay: float | None = _optimisation(
        None, "layer-wise learning-rate decay of the text tower, per block from the top [1]", "(0, 1]"
    )
    lr_scaling: str = _optimisation(
        "none",
        "multiply learning rates by (global batch / N) to the power 0 (none), 1/2 (sqrt:N) or 1 (linear:N); N: the "
        "global batch that --lr is meant for [32768]",
        metavar="none|sqrt[:N]|linear[:N]",
    )
    beta1: float = _optimisation(0.9, "beta1 (adafactor: momentum)", "[0, 1)")
    beta2: float = _optimisation(0.98, "beta2 (adafactor: its upper limit)", "[0, 1)")
    eps: float = _optimisation(1e-6, "epsilon of adamw, adamw8bit and lamb", "> 0")
    wd: float = _optimisation(
        0.2, "weight decay, times lr, of matrices (not of norms, biases, position embeddings)", ">= 0"
    )
    warmup: int | None = _optimisation(None, "warm-up steps [a tenth of the run, at most 10000]", ">= 0")
    lr_scheduler: str = _optimisation("cosine", "learning-rate schedule after the warm-up", choices=SCHEDULES)
    epochs_cooldown: int | None = _optimisation(None, "const-cooldown: decay over the last n epochs", "> 0")
    lr_cooldown_end: float = _optimisation(0.0, "const-cooldown: final learning rate; --lr-scaling applies", ">= 0")
    lr_cooldown_power: float = _optimisation(1.0, "const-cooldown: power of the decay", ">= 0")
    grad_clip_norm: float | None = _optimisation(None, "clip the global gradient norm [no clipping]", "> 0")
    ema_decay: float | None = _optimisation(
        None, "keep a moving average of the weights, e.g. 0.9999, for evaluation and export [none]", "[0, 1)"
    )

    precision: str | None = _system(
        None,
        "amp_bf16: FP32 parameters, BF16 autocast; bf16, fp16: half-precision parameters with FP32 master weights "
        "(ZeRO >= 1) [that of --deepspeed_config, else amp_bf16 on a GPU, fp32 on a CPU]",
        choices=tuple(PRECISIONS),
        type=_as_ours,
    )
    compile_blocks: str = _system("auto", "torch.compile of the towers; auto: on a GPU", choices=("auto", "on", "off"))
    cuda_graphs: bool = _system(
        False,
        "launch each pass of a tower as one CUDA graph: several times faster where the GPU waits for the host, as with "
        "small towers. Our own towers, ZeRO 0 to 2; implies --resident-micro-batches 1",
    )
    pack_captions: str = _system(
        "auto",
        "concatenate captions, so that the text tower computes no padding; auto: where possible, except with "
        "--tensor-parallel-size",
        choices=("auto", "on", "off"),
    )
    attention: str = _system(
        "auto",
        "attention kernels of the towers; auto: Triton on a GPU in half precision, where it is faster",
        choices=("auto", "torch"),
    )
    resident_micro_batches: str = _system(
        "auto",
        "micro-batches whose activations are cached between the two passes and that are encoded only once; auto: as "
        "many as GPU memory allows, 1 on a CPU and with --deterministic",
    )
    pixel_cache_gb: str = _system(
        "auto",
        "GB of host memory per rank that cache pixels between the two passes; other pixels are decoded twice; auto: "
        "0.6 of the free memory; gpu: all pixels in GPU memory",
    )
    deepspeed_config: str = _system("zero1", "ZeRO preset: a name in ds_configs (zero0 to zero3, ...), or a JSON file")
    tensor_parallel_size: int = _system(
        1, "ranks that share every layer (megatron-core); the others are data-parallel", "> 0"
    )
    device: str = _system("auto", "auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu"))
    dist_timeout: float = _system(
        30.0, "minutes until a hung collective stops the run (no batch: a third; a node without heartbeat: 1/45)", "> 0"
    )
    skip_memory_check: bool = _system(False, "start although the memory estimate exceeds the available memory")
    deterministic: bool = _system(False, "bitwise repeatable kernels (slower)")
    seed: int = _system(0, "seed of initialisation, data order, augmentation and dropout")

    logs: str = _run("./logs/", "folder of run folders")
    name: str | None = _run(None, "name of the run folder [time-model-lr-b-j-p]")
    resume: str | None = _run(None, "'latest' (starts from scratch if there is none) or a checkpoint folder")
    save_frequency: int = _run(1, "checkpoint every n epochs (0: only at the end)", ">= 0")
    save_every_n_steps: int = _run(0, "checkpoint every n steps too (0: off)", ">= 0")
    keep_checkpoints: int = _run(3, "keep the last n checkpoints (0: all)", ">= 0")
    val_frequency: int = _run(1, "retrieval on --val-data every n epochs (0: only at the end)", ">= 0")
    zeroshot_frequency: int = _run(2, "zero-shot on --zeroshot-data every n epochs (0: only at the end)", ">= 0")
    log_every_n_steps: int = _run(
        100, "every n steps, compare the ranks' speed and, without a terminal, print a line", "> 0"
    )
    report_to: str = _run(
        "tensorboard", "where metrics go in addition to metrics.jsonl", choices=REPORT_TO, type=_as_ours
    )
    wandb_project_name: str = _run("infcl", "project of --report-to wandb (WANDB_MODE=offline keeps it local)")
    profile: int = _run(0, "profile n steps after 5 warm-up steps: a trace and a table in RUN/profile (0: off)", ">= 0")
    dry_run: bool = _run(False, "print the plan (batch, steps, data, parameters, memory) and exit")
    debug: bool = _run(False, "show tracebacks of configuration errors and debug logging")

    def __post_init__(self) -> None:
        if self.dataset_type == "auto":
            object.__setattr__(self, "dataset_type", "csv" if is_table(self.train_data) else "webdataset")
        if self.cuda_graphs and self.resident_micro_batches == "auto":
            object.__setattr__(self, "resident_micro_batches", "1")

    @property
    def duplicates_and_by(self) -> tuple[str, str]:
        """How the loss treats duplicates and what they have in common: "mask:key:id" -> ("mask", "key:id")."""
        treatment, _, by = self.duplicates.partition(":")
        return treatment, by or "image"

    @property
    def lr_scaling_and_base(self) -> tuple[str, int]:
        """The rule of --lr-scaling and the global batch that --lr is meant for: "sqrt:1024" -> ("sqrt", 1024)."""
        rule, _, base = self.lr_scaling.partition(":")
        return rule, int(base or 32768)

    @property
    def teacher_member(self) -> tuple[str, int]:
        """Extension of the member with the teacher's embeddings, and their width: "l14:768" -> ("l14.npy", 768)."""
        name, _, width = (self.teacher_key or ":0").rpartition(":")
        return f"{name}.npy" if name else "", int(width)

    @property
    def texts_per_image(self) -> int:
        """Number of texts that a step encodes per image: its captions and its hard negative."""
        return self.captions_per_image + (self.negatives_key is not None)

    def to_json(self) -> str:
        """Return the settings as JSON, for config.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def teacher_in_words(flags: Mapping[str, Any]) -> str:
    """Return the teacher of a run's flags and its weight, without the folders that it is in; "" without one."""
    if not (flags.get("distill_model") or flags.get("teacher_key")):
        return ""
    parts = filter(None, (flags["distill_model"], flags["distill_pretrained"]))
    name = " with ".join("/".join(part.rstrip("/").split("/")[-2:]) for part in parts)
    return f"{name or 'stored embeddings ' + flags['teacher_key']}, weight {flags['distill_weight']:g}"


def is_table(train_data: str | None) -> bool:
    return train_data is not None and train_data.lower().endswith((".csv", ".tsv", ".jsonl"))


def shown_default(value: object) -> object:
    """Return the default of a flag as it is given on the command line."""
    return "tab" if value == "\t" else "auto" if value == AUTO_WORKERS else value


def option_of(name: str) -> str:
    """Return the flag of a field: 'batch_size' -> '--batch-size'."""
    return "--deepspeed_config" if name == "deepspeed_config" else "--" + name.replace("_", "-")
