"""The configuration of a run: command line -> one frozen dataclass -> checked numbers.

Flag names and meanings are open_clip's where it has the flag, DeepSpeed's or Megatron's where it has not. The
dataclass is the single source: a field's metadata holds its help and group, `parse_args` derives argparse from it, and
`config.json` in the run folder is the same fields again. Refusing a wrong flag needs no device and no other rank.

Batch arithmetic lives in `BatchPlan` and nowhere else:

    global_batch_size = dp_size * num_micro_batches * micro_batch_size
"""

import argparse
import ast
import dataclasses
import importlib.util
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


def pairs_or_auto(text: str) -> int:
    """'64' -> 64, 'auto' -> 0."""
    try:
        return 0 if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _flag(default, group: str, help: str, **argparse_options):
    metadata = {"group": group, "help": help, "argparse": argparse_options}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run. `None` means "not given"; the help says what then holds."""

    train_data: str | None = _flag(None, "data", "training shards: path, {000..010} braces, folder, or '::' list")
    val_data: str | None = _flag(None, "data", "validation pairs, for retrieval and the validation loss")
    zeroshot_data: str | None = _flag(None, "data", "class folders or labelled shards for zero-shot classification")
    zeroshot_classnames: str | None = _flag(None, "data", "one class name a line [classnames.txt beside the shards]")
    zeroshot_templates: str | None = _flag(None, "data", "one prompt a line, with {} [templates.txt beside the shards]")
    zeroshot_classes: str | None = _flag(None, "data", "which classes compete, a line each, for a subset [all]")
    dataset_type: str = _flag("webdataset", "data", "what --train-data is", choices=("webdataset", "csv", "synthetic"))
    train_data_upsampling_factors: str | None = _flag(
        None,
        "data",
        "'a::b': how often an epoch sees each sample of the '::' parts of --train-data",
    )
    data_reader: str = _flag(
        "indexed", "data", "indexed: exact order and resume; streaming: pipe: urls", choices=("indexed", "streaming")
    )
    train_num_samples: int | None = _flag(None, "data", "samples per epoch (synthetic and streaming data need it)")
    tokenizer: str | None = _flag(None, "data", "sentencepiece .model file, or open_clip:MODEL for CLIP's own")
    workers: int = _flag(4, "data", "data loader processes per rank")
    aug_cfg: dict = _flag(
        {}, "data", "augmentation, e.g. scale='(0.9,1.0)' ratio='(0.75,1.33)' hflip=0.5", nargs="*", metavar="K=V"
    )
    max_bad_fraction: float = _flag(0.01, "data", "end the run when more than this share of samples is unreadable")
    max_missing_shards: float = _flag(0.0, "data", "go on when up to this share of the shards is missing or unreadable")
    max_image_pixels: int = _flag(25_000_000, "data", "larger images are skipped undecoded")
    image_key: str = _flag("jpg;png;jpeg;webp", "data", "extensions of the image member")
    text_key: str = _flag("txt", "data", "extensions of the caption member")
    json_text_key: str | None = _flag(
        None, "data", "captions from this key of the json member ('a;b': the first found)"
    )
    json_text_key_probs: list = _flag(
        [], "data", "draw the order of the --json-text-key keys by these weights", nargs="*", metavar="P", type=float
    )
    csv_separator: str = _flag("\t", "data", "csv: between columns")
    csv_img_key: str = _flag("filepath", "data", "csv: the column of image paths")
    csv_caption_key: str = _flag("title", "data", "csv: the column of captions")
    index_cache: str | None = _flag(
        None, "data", "folder of indexes that cannot lie beside their shards [~/.cache/infcl/index]"
    )
    data_cache: str | None = _flag(
        None, "data", "local folder for shards of storage that cannot be read at random [~/.cache/infcl/shards]"
    )
    data_cache_gb: float = _flag(100.0, "data", "limit of --data-cache; shards used longest ago are removed")
    allow_pipe_urls: bool = _flag(False, "data", "run the shell commands of pipe: urls")
    storage_timeout: float = _flag(30.0, "data", "seconds without a byte after which a read is tried again")
    data_timeout: float = _flag(600.0, "data", "seconds without a batch after which the run ends")

    model: str = _flag("ViT-B-32", "model", "name in infcl/model_configs or path of a JSON file in open_clip's schema")
    pretrained: str | None = _flag(None, "model", "start from these weights: open_clip file or folder, CLIPModel, run")
    pretrained_image: str | None = _flag(None, "model", "the same, of the image tower only")
    pretrained_text: str | None = _flag(None, "model", "the same, of the text tower only")
    force_image_size: int | None = _flag(None, "model", "override the image size of the model config")
    force_context_length: int | None = _flag(None, "model", "override the context length of the model config")
    force_patch_dropout: float | None = _flag(None, "model", "override the patch dropout of the model config")
    lock_image: bool = _flag(False, "model", "freeze the image tower (LiT)")
    lock_image_unlocked_groups: int = _flag(0, "model", "leave the last n blocks of the locked image tower trainable")
    lock_text: bool = _flag(False, "model", "freeze the text tower")
    lock_text_unlocked_layers: int = _flag(0, "model", "leave the last n blocks of the locked text tower trainable")
    frozen_trunk: str = _flag(
        "keep",
        "model",
        "what a partly locked tower's frozen blocks give: keep it for the second pass, or encode again",
        choices=("keep", "again"),
    )
    grad_checkpointing: bool = _flag(False, "model", "recompute each block's activations in the backward pass")

    loss: str = _flag("inf_cl", "loss", "which loss, all over the data-parallel group", choices=LOSS_NAMES)
    tile: str = _flag("auto", "loss", "tile kernel; auto: triton on a GPU", choices=("auto", "torch", "triton"))
    ring: str = _flag(
        "flat", "loss", "two-level: rings within nodes inside a ring of nodes", choices=("auto", "flat", "two-level")
    )
    ring_overlap: str = _flag("on", "loss", "off: wait for each message, to measure it", choices=("on", "off"))

    batch_size: int = _flag(
        64,
        "optimisation",
        "pairs per GPU per micro-batch; auto, with --global-batch-size: the most that memory allows",
        type=pairs_or_auto,
    )
    accum_freq: int = _flag(1, "optimisation", "micro-batches per step; one loss over all of them (gradient cache)")
    global_batch_size: int | None = _flag(
        None, "optimisation", "pairs per step over all ranks; --accum-freq then follows from it and from --batch-size"
    )
    epochs: int = _flag(32, "optimisation", "passes over the training set")
    steps: int | None = _flag(None, "optimisation", "stop (and schedule) at this optimizer step instead of --epochs")
    opt: str = _flag("adamw", "optimisation", "optimizer; docs/optimizers.md", choices=OPTIMIZERS)
    lr: float = _flag(5e-4, "optimisation", "peak learning rate")
    image_lr: float | None = _flag(None, "optimisation", "peak learning rate of the image tower [--lr]")
    text_lr: float | None = _flag(None, "optimisation", "peak learning rate of the text tower [--lr]")
    image_layer_decay: float | None = _flag(None, "optimisation", "times this with each block down the image tower [1]")
    text_layer_decay: float | None = _flag(None, "optimisation", "times this with each block down the text tower [1]")
    lr_scaling: str = _flag(
        "none", "optimisation", "learning rates x (global batch / --lr-base-batch) ^ 0, 1/2, 1", choices=LR_SCALINGS
    )
    lr_base_batch: int = _flag(32768, "optimisation", "the global batch that --lr is meant for; see --lr-scaling")
    beta1: float = _flag(0.9, "optimisation", "beta1 (adafactor: momentum)")
    beta2: float = _flag(0.98, "optimisation", "beta2 (adafactor: its cap)")
    eps: float = _flag(1e-6, "optimisation", "epsilon of adamw, adamw8bit and lamb")
    update_clip: float = _flag(1.0, "optimisation", "adafactor: root mean square of a parameter's update (0: no limit)")
    wd: float = _flag(0.2, "optimisation", "weight decay of matrices (not norms, biases, embeddings of position)")
    wd_mode: str = _flag(
        "lr", "optimisation", "a step decays by --wd times lr, or times lr / peak lr (schedule)", choices=WD_MODES
    )
    warmup: int = _flag(10000, "optimisation", "warm-up steps")
    warmup_samples: int | None = _flag(None, "optimisation", "warm-up samples, instead of --warmup")
    lr_scheduler: str = _flag("cosine", "optimisation", "after the warm-up", choices=SCHEDULES)
    epochs_cooldown: int | None = _flag(None, "optimisation", "const-cooldown: decay over the last n epochs")
    lr_cooldown_end: float = _flag(0.0, "optimisation", "const-cooldown: learning rate at the end")
    lr_cooldown_power: float = _flag(1.0, "optimisation", "const-cooldown: power of the decay")
    max_skipped_steps: int = _flag(
        20,
        "optimisation",
        "end the run (with a checkpoint) when more steps in a row are not finite",
    )
    grad_clip_norm: float | None = _flag(None, "optimisation", "clip the global gradient norm [no clipping]")
    ema_decay: float | None = _flag(None, "optimisation", "keep a moving average of the weights, e.g. 0.9999 [none]")
    ema_eval: bool = _flag(False, "optimisation", "evaluate, and export at the end, the averaged weights")

    precision: str | None = _flag(
        None,
        "system",
        "amp_bf16: fp32 parameters, bf16 autocast; bf16, fp16: low-precision parameters, fp32 masters (ZeRO >= 1) "
        "[what --deepspeed_config says, else amp_bf16 on a GPU, fp32 on a CPU]",
        choices=PRECISIONS,
    )
    compile_blocks: str = _flag(
        "auto", "system", "torch.compile of the towers' blocks; auto: on a GPU", choices=("auto", "on", "off")
    )
    resident_micro_batches: str = _flag(
        "1", "system", "micro-batches that keep their graphs between the passes: N, or auto: what GPU memory allows"
    )
    pixel_cache_gb: str = _flag(
        "auto",
        "system",
        "GB of pixels a rank keeps between the passes, the rest is decoded twice; auto: 0.6 of the free host memory",
    )
    pixel_cache: str = _flag("host", "system", "where kept pixels are", choices=("host", "gpu"))
    encode_micro_batches: int = _flag(
        1, "system", "micro-batches that the first pass (no graph) encodes at once; needs patch dropout 0"
    )
    deepspeed_config: str = _flag("ds_configs/zero1.json", "system", "ZeRO preset")
    tensor_parallel_size: int = _flag(
        1, "system", "ranks that share every layer (megatron-core); the rest of the world is data-parallel"
    )
    sequence_parallel: bool = _flag(
        False, "system", "split activations between the shared layers over the tensor-parallel ranks too"
    )
    device: str = _flag("auto", "system", "auto: cuda where there is a GPU", choices=("auto", "cuda", "cpu"))
    interface: str | None = _flag(
        None, "system", "network interface of all connections; nothing listens on another one"
    )
    host_timeout: float = _flag(40.0, "system", "seconds of silence after which a host counts as lost and the run ends")
    dist_timeout: float = _flag(30.0, "system", "minutes after which a hung collective ends the run")
    skip_memory_check: bool = _flag(False, "system", "start although the estimate says that memory is too small")
    deterministic: bool = _flag(False, "system", "bitwise repeatable kernels (slower)")
    seed: int = _flag(0, "system", "seed of initialisation, data order, augmentation and dropout")

    logs: str = _flag("./logs/", "run", "folder of run folders")
    name: str | None = _flag(None, "run", "run folder's name [time-model-lr-b-j-p]")
    resume: str | None = _flag(None, "run", "'latest' (starts anew where there is nothing) or a checkpoint folder")
    overwrite: bool = _flag(False, "run", "train again although the run folder holds a finished run")
    save_frequency: int = _flag(1, "run", "checkpoint every n epochs (0: only at the end)")
    save_every_n_steps: int = _flag(0, "run", "checkpoint every n steps too (0: off)")
    save_every_minutes: float = _flag(0.0, "run", "checkpoint every x minutes too (0: off)")
    keep_checkpoints: int = _flag(3, "run", "keep the last n checkpoints (0: all)")
    keep_every_n_steps: int = _flag(0, "run", "and those of every n-th step (0: none)")
    val_frequency: int = _flag(1, "run", "retrieval on --val-data every n epochs (0: only at the end)")
    zeroshot_frequency: int = _flag(2, "run", "zero-shot on --zeroshot-data every n epochs (0: only at the end)")
    log_every_n_steps: int = _flag(100, "run", "print a line every n steps where there is no terminal")
    report_to: str = _flag("tensorboard", "run", "where metrics go beside metrics.jsonl", choices=REPORT_TO)
    wandb_project_name: str = _flag("infcl", "run", "project of --report-to wandb (WANDB_MODE=offline keeps it local)")
    profile: int = _flag(0, "run", "profile n steps after 5 warm-up steps: a trace and a table in RUN/profile (0: off)")
    dry_run: bool = _flag(False, "run", "print the plan (batch, steps, data, parameters, memory) and exit")
    debug: bool = _flag(False, "run", "show tracebacks of configuration errors and debug logging")

    def validate(self) -> None:
        """Raise ValueError for what can be refused without looking at files, devices or other ranks."""
        if self.batch_size == 0 and self.global_batch_size is None:
            raise ValueError(
                "--batch-size 0 must be greater than 0; auto needs --global-batch-size, the pairs of a step"
            )
        positive = (
            "accum_freq",
            "epochs",
            "lr",
            "lr_base_batch",
            "eps",
            "dist_timeout",
            "tensor_parallel_size",
            "host_timeout",
            "log_every_n_steps",
            "max_image_pixels",
            "storage_timeout",
            "data_timeout",
            "encode_micro_batches",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must be greater than 0")
        not_negative = (
            "batch_size",
            "workers",
            "wd",
            "warmup",
            "save_frequency",
            "save_every_n_steps",
            "val_frequency",
            "profile",
        )
        not_negative += ("save_every_minutes", "keep_checkpoints", "keep_every_n_steps", "update_clip")
        not_negative += ("max_skipped_steps",)
        for name in (*not_negative, "zeroshot_frequency", "lock_image_unlocked_groups", "lock_text_unlocked_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must not be negative")
        optional = (
            "steps",
            "global_batch_size",
            "train_num_samples",
            "grad_clip_norm",
            "force_image_size",
            "force_context_length",
        )
        optional += ("image_lr", "text_lr", "warmup_samples")
        for name in optional:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must be greater than 0; leave it out for none")
        if self.global_batch_size is not None and self.accum_freq != 1:
            raise ValueError("--accum-freq follows from --global-batch-size: leave one of them out")
        for name in ("beta1", "beta2", "max_bad_fraction", "max_missing_shards"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must lie in [0, 1)")
        if self.force_patch_dropout is not None and not 0 <= self.force_patch_dropout < 1:
            raise ValueError(f"--force-patch-dropout {self.force_patch_dropout} must lie in [0, 1)")
        if self.dataset_type != "synthetic" and self.train_data is None:
            raise ValueError("--train-data is missing: name the training data, or use --dataset-type synthetic")
        if self.dataset_type != "synthetic" and self.tokenizer is None:
            raise ValueError(
                "--tokenizer is missing: name a sentencepiece model "
                "(python -m infcl.data.tokenizer train --train-data ... --out FILE makes one)"
            )
        if self.dataset_type == "synthetic" and self.train_num_samples is None:
            raise ValueError("--dataset-type synthetic needs --train-num-samples: the number of pairs in an epoch")
        if self.lr_scheduler == "const-cooldown" and not self.epochs_cooldown:
            raise ValueError("--lr-scheduler const-cooldown needs --epochs-cooldown: the epochs over which lr decays")
        if self.epochs_cooldown and self.lr_scheduler != "const-cooldown":
            raise ValueError(f"--epochs-cooldown has no meaning with --lr-scheduler {self.lr_scheduler}")
        if self.lock_image and self.lock_text:
            raise ValueError("--lock-image with --lock-text leaves nothing to train but logit_scale: lock one tower")
        for lock, unlocked in (
            ("lock_image", "lock_image_unlocked_groups"),
            ("lock_text", "lock_text_unlocked_layers"),
        ):
            if getattr(self, unlocked) and not getattr(self, lock):
                raise ValueError(f"{_option(unlocked)} {getattr(self, unlocked)} needs {_option(lock)}")
        count = self.resident_micro_batches
        if not _is_size(self.pixel_cache_gb):
            raise ValueError(f"--pixel-cache-gb {self.pixel_cache_gb} is neither a number of at least 0 nor auto")
        if count != "auto" and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"--resident-micro-batches {count} is neither a number above 0 nor auto")
        if self.report_to in ("wandb", "all") and not _is_installed("wandb"):
            raise ValueError(f"--report-to {self.report_to}: wandb is not installed (pip install 'wandb>=0.19')")
        self._validate_optimizer()
        self._validate_tensor_parallel()
        pretrained = ("pretrained", "pretrained_image", "pretrained_text")
        for name in ("train_data", "val_data", "zeroshot_data", "tokenizer", "deepspeed_config", *pretrained):
            _check_plain_path(_option(name), getattr(self, name))
        unknown = set(self.aug_cfg) - set(AUGMENTATIONS)
        if unknown:
            raise ValueError(f"--aug-cfg knows {', '.join(AUGMENTATIONS)}, not {', '.join(sorted(unknown))}")
        parse_factors(self.train_data_upsampling_factors)

    def _validate_optimizer(self) -> None:
        for name in ("image_layer_decay", "text_layer_decay"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must lie in (0, 1]")
        if self.opt == "lamb" and self.wd_mode == "schedule":
            raise ValueError("--wd-mode schedule has no meaning with --opt lamb, whose decay is part of the update")
        if self.opt == "adamw8bit" and not _is_installed("bitsandbytes"):
            raise ValueError("--opt adamw8bit: bitsandbytes is not installed (pip install 'bitsandbytes>=0.49,<0.51')")
        if self.opt in ("lamb", "adafactor") and self.tensor_parallel_size > 1:
            raise ValueError(
                f"--opt {self.opt} needs whole matrices, which --tensor-parallel-size {self.tensor_parallel_size} "
                "splits: use adamw or lion"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"--ema-decay {self.ema_decay} must lie in [0, 1)")
        if self.ema_eval and self.ema_decay is None:
            raise ValueError("--ema-eval needs --ema-decay: there is no average to evaluate")

    def _validate_tensor_parallel(self) -> None:
        size, rows = self.tensor_parallel_size, self.accum_freq * self.batch_size
        if size == 1 and self.sequence_parallel:
            raise ValueError(
                "--sequence-parallel needs --tensor-parallel-size of 2 or more: it splits over those ranks"
            )
        if rows % size and self.global_batch_size is None:
            raise ValueError(
                f"--tensor-parallel-size {size} does not divide the {rows} pairs of a step (--accum-freq "
                f"{self.accum_freq} x --batch-size {self.batch_size}): each of these ranks takes its share of the loss"
            )
        if size > 1 and not (importlib.util.find_spec("megatron") and _is_installed("megatron.core")):
            raise ValueError(
                f"--tensor-parallel-size {size}: megatron-core is not installed (pip install megatron-core==0.16.1)"
            )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class BatchPlan:
    """The one place where batch sizes are multiplied."""

    dp_size: int
    num_micro_batches: int
    micro_batch_size: int

    @classmethod
    def of(cls, config: TrainConfig, dp_size: int) -> "BatchPlan":
        """The plan of a run on `dp_size` data-parallel ranks.

        Under --global-batch-size a micro-batch is the largest one, up to --batch-size, that divides a rank's share.
        ValueError when the ranks do not divide the global batch.
        """
        if config.global_batch_size is None:
            return cls(dp_size, config.accum_freq, config.batch_size)
        share, rest = divmod(config.global_batch_size, dp_size)
        if rest or not share or share % config.tensor_parallel_size:
            ranks = dp_size * config.tensor_parallel_size
            raise ValueError(
                f"--global-batch-size {config.global_batch_size} cannot be shared by {ranks} ranks: use a multiple "
                f"of {ranks}, or ranks that divide it"
            )
        micro = next(size for size in range(min(config.batch_size, share), 0, -1) if share % size == 0)
        return cls(dp_size, share // micro, micro)

    @property
    def rank_batch_size(self) -> int:
        return self.num_micro_batches * self.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.dp_size * self.rank_batch_size

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} pairs a step = {self.dp_size} ranks x {self.num_micro_batches} micro-batches "
            f"(--accum-freq) x {self.micro_batch_size} (--batch-size)"
        )


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else config.epochs * steps_per_epoch


def parse_args(argv: list[str] | None = None) -> TrainConfig:
    """Command line -> validated TrainConfig. Raises ValueError for a wrong flag or value (argparse's own message)."""
    parser = _parser()
    arguments = vars(parser.parse_args(argv))
    for launcher_flag in ("local_rank", "deepspeed"):
        arguments.pop(launcher_flag)
    arguments["aug_cfg"] = _parse_aug_cfg(arguments["aug_cfg"])
    config = TrainConfig(**arguments)
    config.validate()
    return config


class _Parser(argparse.ArgumentParser):
    """argparse that raises: with many ranks the caller decides who prints."""

    def error(self, message: str):
        raise ValueError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_clip.py",
        usage="deepspeed [--hostfile hosts] pretrain_clip.py [flags]",
        description="Exact contrastive pre-training of image and text towers on DeepSpeed ZeRO.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=130),
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for entry in dataclasses.fields(TrainConfig):
        name, options = entry.metadata["group"], dict(entry.metadata["argparse"])
        group = groups.setdefault(name, parser.add_argument_group(name))
        default = entry.default if entry.default is not dataclasses.MISSING else []
        help = entry.metadata["help"]
        if default not in (None, False, []):
            help += f" [{default}]"
        spellings = [_option(entry.name)] + (["--micro-batch-size"] if entry.name == "batch_size" else [])
        if entry.name == "deepspeed_config":
            spellings.append("--deepspeed-config")
        if entry.type in (bool, "bool"):
            options["action"] = "store_true"
        else:
            options.setdefault("type", _value_type(entry.type))
            if "choices" not in options:
                options.setdefault("metavar", {float: "X", str: "S"}.get(options["type"], "N"))
        group.add_argument(*spellings, dest=entry.name, default=default, help=help, **options)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # launchers' habit; always on
    return parser


def _value_type(annotation) -> type:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for name, kind in (("int", int), ("float", float)):
        if text.startswith(name):
            return kind
    return str


def _option(name: str) -> str:
    return "--deepspeed_config" if name == "deepspeed_config" else "--" + name.replace("_", "-")


def parse_factors(text: str | None) -> list[float] | None:
    """'1::2.5' -> [1.0, 2.5]. Raises ValueError when a part is no number above 0."""
    if text is None:
        return None
    try:
        factors = [float(part) for part in text.split("::")]
    except ValueError:
        factors = [0.0]
    if not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"--train-data-upsampling-factors {text!r} is not numbers above 0 between '::'")
    return factors


def _parse_aug_cfg(pairs: list[str]) -> dict:
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            result[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"--aug-cfg {pair!r} is not KEY=VALUE with a number or a (low,high) pair") from None
    return result


def _is_size(text: str) -> bool:
    try:
        return text == "auto" or 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _is_installed(package: str) -> bool:
    """Whether `import package` finds a real package, not merely a folder of that name in the working directory."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _check_plain_path(option: str, value: str | None) -> None:
    """A missing path is refused here; patterns, lists and remote urls are looked at by the data layer."""
    if value is None or any(mark in value for mark in ("::", "{", "*", ":")):
        return
    if not Path(value).exists():
        raise ValueError(f"{option} {value}: no such file or folder")
