"""Settings of a run as one frozen dataclass: its fields are the flags, their defaults and their help.

Flag names and meanings are open_clip's where it has the flag, else DeepSpeed's or Megatron's.
"""

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

LOSS_NAMES = ("inf_cl", "clip", "open_clip", "disco", "siglip")
PRECISIONS = ("fp32", "amp_bf16", "bf16", "fp16")
AUGMENTATIONS = ("scale", "ratio", "hflip", "color_jitter", "color_jitter_prob", "gray_scale_prob", "scaled_decode")
SCHEDULES = ("cosine", "const", "const-cooldown")
LR_SCALINGS = ("none", "sqrt", "linear")
WD_MODES = ("lr", "schedule")
OPTIMIZERS = ("adamw", "adamw8bit", "lion", "lamb", "adafactor")
REPORT_TO = ("tensorboard", "wandb", "all", "none")
DEFAULT_PRESET = "ds_configs/zero1.json"
_SHIPPED_PRESET = Path(__file__).resolve().parents[2] / DEFAULT_PRESET  # in a checkout; pip does not install it


def shipped_preset(name: str = "zero1") -> str:
    """Return the path of ds_configs/NAME.json in the checkout.

    The path is relative ("ds_configs/zero1.json") if the checkout is the working directory, or if there is no checkout.
    A file of that name in another working directory belongs to the user and needs an explicit flag.
    """
    short, shipped = f"ds_configs/{name}.json", _SHIPPED_PRESET.with_name(f"{name}.json")
    there = shipped.exists() and not (Path(short).exists() and shipped.samefile(short))
    return str(shipped) if there else short


AUTO_WORKERS = -1


def pairs_or_auto(text: str) -> int:
    """Parse --batch-size: '64' -> 64, 'auto' -> 0."""
    try:
        size = 0 if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if text != "auto" and size == 0:
        raise argparse.ArgumentTypeError("--batch-size 0 must be greater than 0")
    return size


def workers_or_auto(text: str) -> int:
    """Parse --workers: '4' -> 4, 'auto' -> AUTO_WORKERS."""
    try:
        count = AUTO_WORKERS if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if text != "auto" and count < 0:
        raise argparse.ArgumentTypeError(f"--workers {count} must not be negative")
    return count


def _flag(default, group: str, help: str, **argparse_options):
    metadata = {"group": group, "help": help, "argparse": argparse_options}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. `None` means "not given"; the help states the default then."""

    train_data: str | None = _flag(
        None,
        "data",
        "training shards or tables: paths, {000..010} braces, folders, a '::' list, or @FILE with one per line",
        nargs="+",
    )
    val_data: str | None = _flag(
        None, "data", "image-text pairs for retrieval and the validation loss: shards, a .csv or .tsv, or a .jsonl"
    )
    zeroshot_data: str | None = _flag(None, "data", "class folders or labelled shards for zero-shot classification")
    zeroshot_classnames: str | None = _flag(
        None, "data", "file with one class name per line, or imagenet [classnames.txt next to the data]"
    )
    zeroshot_templates: str | None = _flag(
        None, "data", "file with one prompt per line and {} for the name, or imagenet [templates.txt next to the data]"
    )
    dataset_type: str = _flag(
        "webdataset",
        "data",
        "format of --train-data; streaming: shards read front to back (pipe: URLs), without exact order and resume; "
        "auto: csv for .csv and .tsv files, else webdataset",
        choices=("webdataset", "streaming", "csv", "synthetic", "auto"),
    )
    train_data_upsampling_factors: str | None = _flag(
        None,
        "data",
        "'a::b': how often an epoch uses each sample of the first, second, ... source of --train-data",
    )
    train_num_samples: int | None = _flag(None, "data", "samples per epoch (synthetic and streaming data need it)")
    tokenizer: str | None = _flag(
        None, "data", "sentencepiece .model file, open_clip:MODEL for that model's own, or hf:NAME_OR_FOLDER"
    )
    workers: int = _flag(
        4, "data", "data loader processes per rank; auto: from the node's cores, at most 8", type=workers_or_auto
    )
    aug_cfg: dict = _flag(
        {}, "data", "augmentation, e.g. scale=0.9,1.0 ratio=0.75,1.33 hflip=0.5", nargs="*", metavar="K=V"
    )
    max_bad_fraction: float = _flag(0.01, "data", "stop the run when more than this share of samples is unreadable")
    max_missing_shards: float = _flag(
        0.0, "data", "continue when up to this share of the shards is missing or unreadable"
    )
    max_image_pixels: int = _flag(25_000_000, "data", "skip images with more pixels, without decoding them")
    ignore_exif_orientation: bool = _flag(False, "data", "use images as stored, as open_clip does")
    image_key: str = _flag("jpg;png;jpeg;webp", "data", "extensions of the image member")
    text_key: str = _flag("txt", "data", "extensions of the caption member")
    json_text_key: str | None = _flag(
        None, "data", "take captions from this key of the json member ('a;b': the first key that has text)"
    )
    json_text_key_probs: list = _flag(
        [],
        "data",
        "weights by which the order of the --json-text-key keys is drawn",
        nargs="*",
        metavar="P",
        type=float,
    )
    captions_per_image: int = _flag(
        1,
        "data",
        "captions drawn per image (of a list in json, or of the lines in txt); above 1, all are positives of the "
        "image, which is encoded once",
    )
    negatives_key: str | None = _flag(
        None, "data", "json key of hard-negative captions: adds one text per image to the softmax of the images"
    )
    duplicates: str = _flag(
        "negative",
        "loss",
        "how the loss treats other samples with the same image: as negatives, not at all (mask), or as positives",
        choices=("negative", "mask", "positive"),
    )
    duplicates_by: str = _flag(
        "image", "loss", "what duplicates have in common: image (its bytes), caption, or key:NAME (a json value)"
    )
    csv_separator: str = _flag("\t", "data", "csv: column separator")
    csv_img_key: str = _flag("filepath", "data", "csv: column of image paths")
    csv_caption_key: str = _flag("title", "data", "csv: column of captions")
    index_cache: str | None = _flag(
        None, "data", "folder for indexes that cannot be stored next to their shards [~/.cache/infcl/index]"
    )
    data_cache: str | None = _flag(
        None, "data", "local folder for shards from storage without random access [~/.cache/infcl/shards]"
    )
    data_cache_gb: float = _flag(
        100.0, "data", "size limit of --data-cache in GB; the least recently used shards are removed"
    )
    allow_pipe_urls: bool = _flag(False, "data", "run the shell commands of pipe: URLs")

    model: str = _flag(
        "ViT-B-32",
        "model",
        "name in infcl/models/configs, a JSON file in open_clip's schema, or open_clip:NAME_OR_FILE",
    )
    pretrained: str | None = _flag(
        None, "model", "start from the weights of a file, a folder, a run, a CLIPModel folder, or open_clip:TAG"
    )
    pretrained_image: str | None = _flag(None, "model", "as --pretrained, for the image tower only")
    pretrained_text: str | None = _flag(None, "model", "as --pretrained, for the text tower only")
    force_image_size: int | None = _flag(None, "model", "override the image size of the model config")
    force_context_length: int | None = _flag(None, "model", "override the context length of the model config")
    force_patch_dropout: float | None = _flag(None, "model", "override the patch dropout of the model config")
    image_mean: list = _flag(
        [],
        "model",
        "open_clip: models: pixel mean per channel [preprocess_cfg]",
        nargs=3,
        metavar="X",
        type=float,
    )
    image_std: list = _flag(
        [], "model", "open_clip: models: pixel standard deviation [preprocess_cfg]", nargs=3, metavar="X", type=float
    )
    image_interpolation: str | None = _flag(
        None,
        "model",
        "open_clip: models: interpolation in evaluation [preprocess_cfg]",
        choices=("bicubic", "bilinear", "random"),
    )
    image_resize_mode: str | None = _flag(
        None,
        "model",
        "open_clip: models: how evaluation resizes images that are not square [preprocess_cfg]",
        choices=("shortest", "longest", "squash"),
    )
    lock_image: bool = _flag(False, "model", "freeze the image tower (LiT)")
    lock_image_unlocked_groups: int = _flag(0, "model", "leave the last n blocks of the locked image tower trainable")
    lock_text: bool = _flag(False, "model", "freeze the text tower")
    lock_text_unlocked_layers: int = _flag(0, "model", "leave the last n blocks of the locked text tower trainable")
    frozen_trunk: str = _flag(
        "keep",
        "model",
        "output of the frozen blocks of a partly locked tower: keep it for the second pass, or compute it again",
        choices=("keep", "again"),
    )
    grad_checkpointing: bool = _flag(False, "model", "recompute each block's activations in the backward pass")

    loss: str = _flag("inf_cl", "loss", "loss over the global batch", choices=LOSS_NAMES)
    tile: str = _flag(
        "auto", "loss", "kernel of the loss's tiles; auto: triton on a GPU", choices=("auto", "torch", "triton")
    )
    tile_dtype: str = _flag(
        "auto",
        "loss",
        "precision of the loss's matmuls; auto: that of --precision on a GPU, fp32 on a CPU",
        choices=("auto", "bf16", "fp16", "tf32", "fp32"),
    )

    batch_size: int = _flag(
        64,
        "optimisation",
        "samples per GPU and micro-batch; auto: the largest size that fits into memory (needs --global-batch-size)",
        type=pairs_or_auto,
    )
    accum_freq: int = _flag(1, "optimisation", "micro-batches per step; one loss over all of them (gradient cache)")
    global_batch_size: int | None = _flag(
        None, "optimisation", "samples per step over all ranks; sets --accum-freq together with --batch-size"
    )
    epochs: int = _flag(32, "optimisation", "passes over the training set")
    steps: int | None = _flag(
        None, "optimisation", "length of training and schedule in optimizer steps, instead of --epochs"
    )
    opt: str = _flag("adamw", "optimisation", "optimizer; see docs/howto/learning-rates.md", choices=OPTIMIZERS)
    lr: float = _flag(5e-4, "optimisation", "peak learning rate")
    image_lr: float | None = _flag(None, "optimisation", "peak learning rate of the image tower [--lr]")
    text_lr: float | None = _flag(None, "optimisation", "peak learning rate of the text tower [--lr]")
    image_layer_decay: float | None = _flag(
        None, "optimisation", "layer-wise learning-rate decay of the image tower, per block from the top [1]"
    )
    text_layer_decay: float | None = _flag(
        None, "optimisation", "layer-wise learning-rate decay of the text tower, per block from the top [1]"
    )
    lr_scaling: str = _flag(
        "none",
        "optimisation",
        "multiply learning rates by (global batch / --lr-base-batch) to the power 0 (none), 1/2 (sqrt) or 1 (linear)",
        choices=LR_SCALINGS,
    )
    lr_base_batch: int = _flag(32768, "optimisation", "global batch that --lr is meant for; see --lr-scaling")
    beta1: float = _flag(0.9, "optimisation", "beta1 (adafactor: momentum)")
    beta2: float = _flag(0.98, "optimisation", "beta2 (adafactor: its upper limit)")
    eps: float = _flag(1e-6, "optimisation", "epsilon of adamw, adamw8bit and lamb")
    wd: float = _flag(0.2, "optimisation", "weight decay of matrices (not of norms, biases, position embeddings)")
    wd_mode: str = _flag(
        "lr",
        "optimisation",
        "decay per step: --wd times lr (lr), or --wd times lr / peak lr (schedule)",
        choices=WD_MODES,
    )
    warmup: int = _flag(10000, "optimisation", "warm-up steps")
    warmup_samples: int | None = _flag(None, "optimisation", "warm-up samples, instead of --warmup")
    lr_scheduler: str = _flag("cosine", "optimisation", "learning-rate schedule after the warm-up", choices=SCHEDULES)
    epochs_cooldown: int | None = _flag(None, "optimisation", "const-cooldown: decay over the last n epochs")
    lr_cooldown_end: float = _flag(0.0, "optimisation", "const-cooldown: final learning rate; --lr-scaling applies")
    lr_cooldown_power: float = _flag(1.0, "optimisation", "const-cooldown: power of the decay")
    max_skipped_steps: int = _flag(
        20,
        "optimisation",
        "stop (with a checkpoint) after more than this number of steps in a row with non-finite gradients",
    )
    grad_clip_norm: float | None = _flag(None, "optimisation", "clip the global gradient norm [no clipping]")
    ema_decay: float | None = _flag(None, "optimisation", "keep a moving average of the weights, e.g. 0.9999 [none]")
    ema_eval: bool = _flag(False, "optimisation", "use the averaged weights for evaluation and the final export")

    precision: str | None = _flag(
        None,
        "system",
        "amp_bf16: FP32 parameters, BF16 autocast; bf16, fp16: half-precision parameters with FP32 master weights "
        "(ZeRO >= 1) [that of --deepspeed_config, else amp_bf16 on a GPU, fp32 on a CPU]",
        choices=PRECISIONS,
    )
    compile_blocks: str = _flag(
        "auto", "system", "torch.compile of the towers; auto: on a GPU", choices=("auto", "on", "off")
    )
    pack_captions: str = _flag(
        "auto",
        "system",
        "concatenate captions, so that the text tower computes no padding; auto: where possible, except with "
        "--tensor-parallel-size",
        choices=("auto", "on", "off"),
    )
    attention: str = _flag(
        "auto",
        "system",
        "attention kernels of the towers; auto: triton on a GPU in half precision, where it is faster",
        choices=("auto", "torch", "triton"),
    )
    resident_micro_batches: str = _flag(
        "auto",
        "system",
        "micro-batches whose activations are cached between the two passes and that are encoded only once; auto: as "
        "many as GPU memory allows, 1 on a CPU and with --deterministic",
    )
    pixel_cache_gb: str = _flag(
        "auto",
        "system",
        "GB of host memory per rank that cache pixels between the two passes; other pixels are decoded twice; auto: "
        "0.6 of the free memory; gpu: all pixels in GPU memory",
    )
    deepspeed_config: str = _flag(DEFAULT_PRESET, "system", "ZeRO preset: zero0 to zero3, or a JSON file")
    tensor_parallel_size: int = _flag(
        1, "system", "ranks that share every layer (megatron-core); the others are data-parallel"
    )
    sequence_parallel: bool = _flag(
        False,
        "system",
        "also split activations between the tensor-parallel layers, to save memory; ViT-L-14 is faster with it from "
        "--batch-size 256",
    )
    device: str = _flag("auto", "system", "auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu"))
    interface: str | None = _flag(None, "system", "network interface for all connections")
    host_timeout: float = _flag(
        40.0, "system", "seconds without a heartbeat after which a node counts as lost and the run stops"
    )
    dist_timeout: float = _flag(
        30.0, "system", "minutes until a hung collective stops the run (a hung disk: 0.8 of it; no batch: a third)"
    )
    skip_memory_check: bool = _flag(False, "system", "start although the memory estimate exceeds the available memory")
    deterministic: bool = _flag(False, "system", "bitwise repeatable kernels (slower)")
    seed: int = _flag(0, "system", "seed of initialisation, data order, augmentation and dropout")

    logs: str = _flag("./logs/", "run", "folder of run folders")
    name: str | None = _flag(None, "run", "name of the run folder [time-model-lr-b-j-p]")
    resume: str | None = _flag(None, "run", "'latest' (starts from scratch if there is none) or a checkpoint folder")
    overwrite: bool = _flag(False, "run", "train again although the run folder holds a finished run")
    save_frequency: int = _flag(1, "run", "checkpoint every n epochs (0: only at the end)")
    save_every_n_steps: int = _flag(0, "run", "checkpoint every n steps too (0: off)")
    save_every_minutes: float = _flag(0.0, "run", "checkpoint every x minutes too (0: off)")
    keep_checkpoints: int = _flag(3, "run", "keep the last n checkpoints (0: all)")
    keep_every_n_steps: int = _flag(0, "run", "also keep the checkpoint of every n-th step (0: off)")
    val_frequency: int = _flag(1, "run", "retrieval on --val-data every n epochs (0: only at the end)")
    zeroshot_frequency: int = _flag(2, "run", "zero-shot on --zeroshot-data every n epochs (0: only at the end)")
    log_every_n_steps: int = _flag(
        100, "run", "every n steps, compare the ranks' speed and, without a terminal, print a line"
    )
    report_to: str = _flag("tensorboard", "run", "where metrics go in addition to metrics.jsonl", choices=REPORT_TO)
    wandb_project_name: str = _flag("infcl", "run", "project of --report-to wandb (WANDB_MODE=offline keeps it local)")
    profile: int = _flag(0, "run", "profile n steps after 5 warm-up steps: a trace and a table in RUN/profile (0: off)")
    dry_run: bool = _flag(False, "run", "print the plan (batch, steps, data, parameters, memory) and exit")
    debug: bool = _flag(False, "run", "show tracebacks of configuration errors and debug logging")

    @property
    def texts_per_image(self) -> int:
        """Number of texts that a step encodes per image: its captions and its hard negative."""
        return self.captions_per_image + (self.negatives_key is not None)

    def to_json(self) -> str:
        """Return the settings as JSON, for config.json.

        The checkout's default preset is stored as the flag's default, so that the file is the same from any working
        directory. Another file of the same name is stored with its absolute path.
        """
        fields = dataclasses.asdict(self)
        if fields["deepspeed_config"] == str(_SHIPPED_PRESET):
            fields["deepspeed_config"] = DEFAULT_PRESET
        elif fields["deepspeed_config"] == DEFAULT_PRESET != shipped_preset() and Path(DEFAULT_PRESET).exists():
            fields["deepspeed_config"] = str(Path(DEFAULT_PRESET).resolve())
        return json.dumps(fields, indent=2) + "\n"


def option_of(name: str) -> str:
    """Return the flag of a field: 'batch_size' -> '--batch-size'."""
    return "--deepspeed_config" if name == "deepspeed_config" else "--" + name.replace("_", "-")
