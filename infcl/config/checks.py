"""Check flags without reading file contents, devices or other ranks; reject each wrong value with the fix."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from infcl.config.preset import preset_file
from infcl.config.redaction import check_text
from infcl.config.settings import AUGMENTATIONS, TrainConfig, is_table, option_of

BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "> 0": (lambda value: value > 0, "must be greater than 0"),
    ">= 0": (lambda value: value >= 0, "must not be negative"),
    "[0, 1]": (lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
    "[0, 1)": (lambda value: 0 <= value < 1, "must lie in [0, 1)"),
    "[-2, 2]": (lambda value: -2 <= value <= 2, "must lie in [-2, 2]: it is a difference of two cosines"),
    "(0, 1]": (lambda value: 0 < value <= 1, "must lie in (0, 1]"),
    "(0, 1e4]": (lambda value: 0 < value <= 1e4, "must lie in (0, 10000]: it multiplies cosines, CLIP's is 100"),
}  # of the fields' metadata
_PATHS = (
    "train_data", "val_data", "zeroshot_data", "tokenizer", "deepspeed_config",
    "pretrained", "pretrained_image", "pretrained_text", "distill_pretrained",
)  # fmt: skip
_WEIGHTS = "it takes a file, a folder, a run, or open_clip:TAG, whose weights open_clip downloads"
_MEANT = {  # hints for users who give a name instead of a path
    "deepspeed_config": "it takes a name in ds_configs (zero1), or a JSON file",
    "tokenizer": "it takes a sentencepiece model, or open_clip:ViT-B-32 for CLIP's own",
    "pretrained": _WEIGHTS,
    "pretrained_image": _WEIGHTS,
    "pretrained_text": _WEIGHTS,
}


def validate(config: TrainConfig) -> None:
    """Check all settings.

    Raises:
        ValueError: for the first invalid setting, with its value and the fix.
    """
    for field in dataclasses.fields(config):
        if isinstance(text := getattr(config, field.name), str):
            check_text(option_of(field.name), text)
    groups = (_bounds, _data, _schedule_and_towers, _memory_and_reports, _loss, _teacher, _optimizer, _tensor_parallel)
    for problem in chain.from_iterable(problems(config) for problems in (*groups, _paths)):
        raise ValueError(problem)
    parse_factors(config.train_data_upsampling_factors)


def parse_factors(text: str | None) -> list[float] | None:
    """Parse --train-data-upsampling-factors: '1::2.5' -> [1.0, 2.5].

    Raises:
        ValueError: a part is not a finite number above 0.
    """
    if text is None:
        return None
    try:
        factors = [float(part) for part in text.split("::")]
    except ValueError:
        factors = [0.0]
    if not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"--train-data-upsampling-factors {text!r} is not numbers above 0 between '::'")
    return factors


# ---- the problems of some settings ----


def _bounds(config: TrainConfig) -> Iterator[str]:
    for field in dataclasses.fields(config):
        name, value, bounds = option_of(field.name), getattr(config, field.name), field.metadata["bounds"]
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, float) and not math.isfinite(part):
                yield f"{name} {part} must be a finite number"
        choices, count = (field.metadata["argparse"].get(key) for key in ("choices", "nargs"))
        if choices and value not in (*choices, None):  # --config's values do not pass argparse's checks
            yield f"{name} {value}: give one of {', '.join(choices)}"
        if isinstance(count, int) and len(parts) not in (0, count):
            yield f"{name} {' '.join(map(str, parts))} must be {count} numbers"
        if bounds is None or value is None:
            continue
        holds, words = BOUNDS[bounds]
        if not holds(value):
            yield f"{name} {value} {words}" + ("; leave it out for none" if field.default is None else "")
    if config.batch_size == 0 and config.global_batch_size is None:
        yield "--batch-size auto needs --global-batch-size: the samples per step"
    if config.global_batch_size is not None and config.accum_freq != 1:
        yield "--accum-freq follows from --global-batch-size: leave one of them out"
    if not 0 <= config.seed < 2**63:
        yield f"--seed {config.seed} must lie in [0, 2**63)"


def _data(config: TrainConfig) -> Iterator[str]:
    kind = config.dataset_type
    if unknown := set(config.aug_cfg) - set(AUGMENTATIONS):
        yield f"--aug-cfg takes {', '.join(AUGMENTATIONS)}, not {', '.join(sorted(unknown))}"
    if kind in ("synthetic", "streaming") and config.train_num_samples is None:
        yield f"--dataset-type {kind} needs --train-num-samples: the number of samples in an epoch"
    if kind == "streaming" and config.train_data_upsampling_factors is not None:
        yield "--train-data-upsampling-factors needs --dataset-type webdataset, not streaming"
    if kind == "csv" and config.teacher_key:
        yield "tables have no members for --teacher-key: it needs shards"
    if kind == "synthetic":
        return
    if config.train_data is None:
        yield "--train-data is missing: name the data, or use --dataset-type synthetic; `make train` runs the demo"
    if config.dataset_type in ("webdataset", "streaming") and is_table(config.train_data):
        yield (
            f"--train-data {config.train_data} is a table: add --dataset-type csv, and --csv-separator , where commas "
            "separate its columns"
        )
    elif len({is_table(part) for part in (config.train_data or "").split("::")}) > 1:
        yield f"--train-data {config.train_data} mixes tables and shards: infcl-shards pack makes shards of a table"
    if config.tokenizer is None:
        yield (
            "--tokenizer is missing: give open_clip:ViT-B-32 for CLIP's own, or a sentencepiece model "
            "(python -m infcl.data.tokenizer train --train-data ... --out FILE makes one)"
        )


def _schedule_and_towers(config: TrainConfig) -> Iterator[str]:
    if config.steps is not None and config.epochs != TrainConfig.epochs:
        yield f"--steps {config.steps} and --epochs {config.epochs}: leave one of them out"
    if not re.fullmatch(r"none|(sqrt|linear)(:0*[1-9]\d*)?", config.lr_scaling):
        yield (
            f"--lr-scaling {config.lr_scaling}: give none, sqrt or linear, the last two also with the global batch "
            "that --lr is meant for, like sqrt:32768"
        )
    if config.lr_scheduler == "const-cooldown" and not config.epochs_cooldown:
        yield "--lr-scheduler const-cooldown needs --epochs-cooldown: the epochs over which lr decays"
    if config.lr_scheduler == "const-cooldown" and config.lr_cooldown_end > config.lr:
        yield f"--lr-cooldown-end {config.lr_cooldown_end:g}, the learning rate at the end, is above --lr {config.lr:g}"
    for name in ("lr_cooldown_end", "epochs_cooldown"):
        if getattr(config, name) and config.lr_scheduler != "const-cooldown":
            yield f"{option_of(name)} has no meaning with --lr-scheduler {config.lr_scheduler}"
    unlocked_groups = config.lock_image_unlocked_groups + config.lock_text_unlocked_layers
    if config.lock_image and config.lock_text and not unlocked_groups:
        yield "--lock-image with --lock-text trains logit_scale only: lock one, or add --lock-image-unlocked-groups"
    for lock, unlocked in (("lock_image", "lock_image_unlocked_groups"), ("lock_text", "lock_text_unlocked_layers")):
        if (groups := getattr(config, unlocked)) and not getattr(config, lock):
            yield f"{option_of(unlocked)} {groups} needs {option_of(lock)}"


def _memory_and_reports(config: TrainConfig) -> Iterator[str]:
    if not _is_size(config.pixel_cache_gb):
        yield f"--pixel-cache-gb {config.pixel_cache_gb} is neither a number of at least 0 nor auto nor gpu"
    count = config.resident_micro_batches
    if count != "auto" and not (count.isdecimal() and int(count) > 0):
        yield f"--resident-micro-batches {count} is neither a number above 0 nor auto"
    if config.report_to in ("wandb", "all") and not _is_installed("wandb"):
        yield f"--report-to {config.report_to}: wandb is not installed (pip install 'wandb>=0.19')"


def _loss(config: TrainConfig) -> Iterator[str]:
    count = config.captions_per_image
    if not re.fullmatch("(negative|mask|positive)(:(image|caption|key:.+))?", config.duplicates):
        yield (
            f"--duplicates {config.duplicates}: give negative, mask or positive, also with :image, :caption or "
            ":key:NAME"
        )
    treatment, by = config.duplicates_and_by
    if treatment != "negative" and config.loss not in ("inf_cl", "siglip"):
        yield f"--duplicates {config.duplicates} is for --loss inf_cl and siglip, not {config.loss}"
    if config.texts_per_image > 1 and config.loss != "inf_cl":
        yield f"--captions-per-image {count} and --negatives-key are for --loss inf_cl, not {config.loss}"
    if count > 1 and (treatment == "mask" or (treatment == "positive" and by == "caption")):
        yield (
            f"--captions-per-image {count} makes captions of one image its positives, which --duplicates "
            f"{config.duplicates} contradicts: use positive, positive:key:NAME or negative"
        )
    if config.dataset_type == "synthetic" and (treatment != "negative" or config.texts_per_image > 1):
        yield "--dataset-type synthetic has no data for --duplicates, --negatives-key, --captions-per-image"
    if config.false_negative_margin is not None and (config.loss not in ("inf_cl", "siglip") or count > 1):
        yield (
            f"--false-negative-margin {config.false_negative_margin:g} is for --loss inf_cl and siglip with one "
            f"caption per image, not for {config.loss} with {count}"
        )
    if config.matryoshka_weights and not config.matryoshka_widths:
        yield "--matryoshka-weights needs --matryoshka-widths"
    if config.loss in ("clip", "open_clip", "disco") and config.tile_dtype not in ("auto", "fp32"):
        yield f"--tile-dtype {config.tile_dtype} is for --loss inf_cl and siglip; {config.loss} multiplies in float32"


def _teacher(config: TrainConfig) -> Iterator[str]:
    model, weights, key = config.distill_model, config.distill_pretrained, config.teacher_key
    if model and key:
        yield f"--distill-model {model} and --teacher-key {key}: leave one of them out"
    if key and not re.fullmatch(r"[^:./]+:0*[1-9]\d{0,4}", key):
        yield f"--teacher-key {key}: give NAME:N for members KEY.NAME.npy with embeddings of N numbers, like l14:768"
    if weights and (not model or Path(weights).is_dir()):
        yield (
            f"--distill-pretrained {weights}: it is the weights file or tag of --distill-model; a folder with a model "
            "is given as --distill-model alone"
        )
    if model and not weights and not Path(model).is_dir():
        yield f"--distill-model {model} is no folder with weights: add --distill-pretrained"
    if not (model or key) and (config.teacher_scale is not None or config.distill_weight != 1):
        yield "--teacher-scale and --distill-weight need a teacher: --distill-model or --teacher-key"
    if config.dataset_type == "synthetic" and (model or key):
        yield "--dataset-type synthetic has no captions for --distill-model and --teacher-key"
    if key and config.json_text_key_probs:
        yield "--teacher-key has embeddings of the same captions in every epoch: no --json-text-key-probs"


def _optimizer(config: TrainConfig) -> Iterator[str]:
    if config.opt == "adamw8bit" and not _is_installed("bitsandbytes"):
        yield "--opt adamw8bit: bitsandbytes is not installed (pip install 'bitsandbytes>=0.49,<0.51')"
    if config.opt in ("lamb", "adafactor") and config.tensor_parallel_size > 1:
        yield f"--opt {config.opt} needs full matrices, which --tensor-parallel-size splits: use adamw or lion"


def _tensor_parallel(config: TrainConfig) -> Iterator[str]:
    size, rows = config.tensor_parallel_size, config.batch_size
    if rows and (rows < size if config.global_batch_size else rows % size):  # 0: auto
        below = rows // size * size
        yield (
            f"--tensor-parallel-size {size} does not divide --batch-size {rows}: its ranks share each micro-batch. "
            f"Use {f'{below} or ' if below else ''}{below + size}"
        )
    if size > 1 and not (importlib.util.find_spec("megatron") and _is_installed("megatron.core")):
        yield f"--tensor-parallel-size {size}: megatron-core is not installed (pip install megatron-core==0.16.1)"


def _paths(config: TrainConfig) -> Iterator[str]:
    """Yield paths that are missing; the data layer checks patterns, lists and remote URLs."""
    for name in _PATHS:
        value = getattr(config, name)
        if value is None or any(mark in value for mark in ("::", "{", "*", "?", "[", ":")):
            continue
        path = preset_file(value) if name == "deepspeed_config" else Path(value.removeprefix("@"))
        if not path.exists():
            hint = f" ({_MEANT[name]})" if name in _MEANT else ""
            yield f"{option_of(name)} {value}: no such file or folder{hint}"


def _is_size(text: str) -> bool:
    try:
        return text in ("auto", "gpu") or 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _is_installed(package: str) -> bool:
    """Return whether `import package` finds a real package, not only a folder of that name in the working directory."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
