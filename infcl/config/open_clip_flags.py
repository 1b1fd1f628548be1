"""Flags of open_clip, EVA-CLIP and Inf-CLIP that this trainer does not have.

ACCEPTED: flags without a meaning here, which are ignored with a note. EQUIVALENTS: what to give instead of the others,
which are usage errors. Both are {flag: text}.
"""

_ACCEPTED = {  # a flag that ends in = takes a value
    "the loss and its gradients are always those of the global batch": "--local-loss --gather-with-grad "
    "--loss-dist-impl=",
    "--compile-blocks compiles the towers": "--torchcompile --torchcompile-strategy= --torchcompile-backend= "
    "--torchcompile-mode= --torchscript --trace",
    "DeepSpeed connects the ranks": "--horovod --ddp-static-graph",
    "the launcher sets it": "--dist-url= --dist-backend= --no-set-device-rank",
    "an epoch uses every sample, in a new order": "--dataset-resampled",
    "samples are counted by the index": "--val-num-samples=",
    "retrieval is computed in tiles, in FP32": "--val-retrieval-chunk-size= --val-retrieval-precision=",
    "rank 0 writes the logs": "--log-local",
    "metrics.jsonl has every step": "--log-metric-every-n-steps= --train-loss-ema-samples=",
    "the newest checkpoint is always kept": "--save-most-recent",
    "environment.json has the commit": "--copy-codebase",
    "weights of either layout load": "--force-custom-text",
    "a locked image tower always keeps its statistics": "--lock-image-freeze-bn-stats",
}
_ZERO_SHOT = "--zeroshot-data DIR --zeroshot-classnames imagenet --zeroshot-templates imagenet"
_EQUIVALENTS = {
    "--loss siglip": "--siglip",
    _ZERO_SHOT: "--imagenet-val",
    f"python -m infcl.evaluate --checkpoint RUN --task zeroshot, or {_ZERO_SHOT}": "--imagenet-v2",
    "--lr-scheduler const --warmup 0": "--skip-scheduler",
    "--keep-checkpoints 1": "--delete-previous-checkpoint",
    "--model open_clip:NAME-quickgelu, or quick_gelu in the model's JSON file": "--force-quick-gelu",
    "the environment variable HF_HUB_CACHE": "--cache-dir",
    "the environment variable WANDB_NOTES": "--wandb-notes",
    "--beta1, --beta2, --eps": "--momentum --opt-kwargs",
    "norms, biases, position and class embeddings never decay": "--wd-exclude",
    "statistics are not synchronized between ranks; use a larger --batch-size": "--use-bn-sync",
    "--opt adamw8bit saves memory; 8-bit layers are not available": "--use-bnb-linear",
    "--lock-text alone freezes all of the text tower": "--lock-text-freeze-layer-norm",
    "CoCa is not trained here": "--coca-caption-loss-weight --coca-contrastive-loss-weight",
    "put --logs on shared storage, or copy the run folder": "--remote-sync --remote-sync-frequency "
    "--remote-sync-protocol",
    "--deepspeed_config zero3": "--fsdp",
    "--deepspeed_config zero3_offload": "--fsdp-offload-cpu",
    "DeepSpeed is always used; --deepspeed_config zero1": "--enable-deepspeed",
    "--deepspeed_config zero0 to zero3": "--zero-stage",
    "--opt": "--optimizer",
    "--image-lr": "--visual-lr",
    "--image-layer-decay": "--visual-ld",
    "--text-layer-decay": "--text-ld",
    "--loss inf_cl": "--infloss --ringloss --flashloss",
    "--loss disco": "--discoloss",
    "--logs": "--log-dir",
}
ACCEPTED, EQUIVALENTS = (
    {flag: text for text, flags in table.items() for flag in flags.split()} for table in (_ACCEPTED, _EQUIVALENTS)
)


def notes_on_ignored(argv: list[str]) -> list[str]:
    """Return a line for each flag of the command line that has no meaning here."""
    given = dict.fromkeys(text.partition("=")[0] for text in argv)
    reasons = {name.rstrip("="): reason for name, reason in ACCEPTED.items()}
    return [f"{flag} is ignored: {reasons[flag]}" for flag in given if flag in reasons]
