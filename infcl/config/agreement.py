"""Settings that must be equal: on all nodes of a run, and when its command is repeated.

Ranks with different settings wait for each other until a time-out, or train something unintended. Compared are flags,
the preset, a model's JSON file and the tokenizer.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from infcl.config.preset import preset_file
from infcl.config.settings import TrainConfig, option_of

# They change nothing that a run computes: nodes may have different values, and a repeated command may have others.
WITHOUT_EFFECT = (
    "workers", "pixel_cache_gb", "device", "index_cache", "dist_timeout", "skip_memory_check", "debug", "report_to",
    "wandb_project_name", "profile", "log_every_n_steps",
)  # fmt: skip
_TOGETHER = ("dist_timeout", "skip_memory_check", "log_every_n_steps")  # of these: all ranks act on them together
# They belong to one start of a run.
OF_ONE_START = ("name", "resume", "dry_run", "debug")
# Nodes may store them elsewhere: only whether a path is given is compared.
OWN_PATHS = (
    "train_data", "val_data", "zeroshot_data", "zeroshot_classnames", "zeroshot_templates",
    "pretrained", "pretrained_image", "pretrained_text", "distill_pretrained", "csv_img_root", "logs", "resume",
)  # fmt: skip
# Their contents are compared, by SHA-256.
SAME_CONTENTS = ("deepspeed_config", "model", "distill_model", "tokenizer")


def settings_of(config: TrainConfig) -> dict[str, str]:
    """Return the settings that must be equal on all nodes: {"--lr": "0.0005", "--model": "ViT-B-32", ...}.

    It never contains the value of a path in `OWN_PATHS`, so that a message cannot print a secret.
    """
    settings: dict[str, str | None] = {}
    for name, value in dataclasses.asdict(config).items():
        option = option_of(name)
        if name in WITHOUT_EFFECT and name not in _TOGETHER:
            continue
        if name in SAME_CONTENTS and value is not None:
            settings[option] = _contents(option, value)
        elif name in OWN_PATHS:
            settings[option] = value if value in (None, "latest") else "given"
        else:
            settings[option] = value if isinstance(value, str) else json.dumps(value)
    return {option: "not given" if value is None else value for option, value in settings.items()}


def _contents(option: str, path: str) -> str:
    try:
        data = (preset_file(path) if option == "--deepspeed_config" else Path(path)).read_bytes()
    except (OSError, ValueError):  # a name, like ViT-B-16 or open_clip:ViT-B-32
        return path
    return f"sha256 {hashlib.sha256(data).hexdigest()[:12]}"
