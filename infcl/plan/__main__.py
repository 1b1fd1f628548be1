"""python -m infcl.plan --gpus 32 --gpu a800-80g --model ViT-L-14 --global-batch-size 12582912 ...

Print the memory by part, the phases of a step, samples/s and the largest batch of a run, from the flags of
pretrain_clip.py; flags about data and weights are ignored. --measure FILE writes a profile of this machine
(measure.py). Figures are estimates: docs/benchmarks/planner.md.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from infcl.config import OneLineParser, RunSpec, TrainConfig, counted, parse_args, resolve, shown_bytes
from infcl.models.clip import CLIP, lock_towers
from infcl.models.config import CLIPConfig, load_model_config
from infcl.plan.fit import Fit, fits_gpu, largest_batch, with_cached_activations
from infcl.plan.memory import host_bytes, host_parts, memory_of
from infcl.plan.profile import load_gpu, load_link
from infcl.plan.setting import Setting, captions_of, parameter_counts, setting_of_run
from infcl.plan.timing import phases_of

# A plan needs neither data nor weights, and may be made where they are not.
_WITHOUT_DATA = dict.fromkeys(
    ("train_data", "val_data", "zeroshot_data", "tokenizer", "pretrained", "pretrained_image", "pretrained_text")
) | {"dataset_type": "synthetic", "train_num_samples": 1}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that the trainer does not have."""
    flags = OneLineParser(
        prog="python -m infcl.plan",
        usage="%(prog)s [--gpus N] [--gpu NAME] [--link NAME] [flags of pretrain_clip.py]",
        description=__doc__.split("\n\n")[1],
        allow_abbrev=False,
    )
    flags.add_argument("--gpus", type=int, default=8)
    flags.add_argument("--gpus-per-node", type=int, default=8)
    flags.add_argument("--gpu", default="h200", help="profile of infcl/plan/profiles/gpus, or a file of --measure")
    flags.add_argument("--link", default="nic-400", help="profile of infcl/plan/profiles/links, or a file like them")
    flags.add_argument("--caption-tokens", type=int, help="of a packed caption, on average; default: padded captions")
    flags.add_argument("--measure", type=Path, help="measure this machine's first GPU, write its profile, and exit")
    return flags


def setting_of(argv: list[str]) -> tuple[Setting, RunSpec]:
    """Return the setting of a command line, and the run that the trainer makes of it.

    Raises:
        ValueError: the flags contradict each other, the model or the machine.
    """
    machine, words = parser().parse_known_args(argv)
    flags = parse_args(words, **_WITHOUT_DATA)
    sizes = {name: getattr(flags, f"force_{name}") for name in ("image_size", "context_length", "patch_dropout")}
    cfg = load_model_config(flags.model).with_overrides(**sizes)
    gpu, link = load_gpu(machine.gpu), load_link(machine.link)
    _check_machine(machine, flags, cfg)
    per_node = min(machine.gpus, machine.gpus_per_node)
    spec = resolve(
        flags,
        device="cuda",
        ranks=machine.gpus // flags.tensor_parallel_size,
        hosts=machine.gpus // per_node,
        unpackable=cfg.text_cfg.why_unpackable,
    )
    if not gpu.bf16 and spec.precision.matmul_dtype == torch.bfloat16:
        raise ValueError(f"{gpu.name} does not compute bf16: use --precision fp16 or fp32")
    with torch.device("meta"):
        model = CLIP(cfg)
    lock_towers(model, flags)
    counts = parameter_counts(model)
    if flags.batch_size == 0:
        spec = Fit(spec, cfg, counts, gpu.memory_gib * 2**30, ranks_of_host=per_node).choose()
    captions = captions_of(cfg, machine.caption_tokens)
    setting = setting_of_run(spec, captions.pop("model"), counts, ranks_of_host=per_node)
    setting = setting.with_(gpu=gpu, link=link, attention=flags.attention, **captions)
    if flags.resident_micro_batches == "auto" and not flags.deterministic:
        setting = with_cached_activations(setting)
    return setting, spec


def _check_machine(machine: argparse.Namespace, flags: TrainConfig, cfg: CLIPConfig) -> None:
    """Raise ValueError if the GPUs do not fill nodes or tensor-parallel groups, or captions have too many tokens."""
    gpus, per_node, parts = machine.gpus, machine.gpus_per_node, flags.tensor_parallel_size
    length, tokens = cfg.text_cfg.context_length, machine.caption_tokens
    if min(gpus, per_node) < 1:
        raise ValueError(f"--gpus {gpus} and --gpus-per-node {per_node} must be greater than 0")
    if gpus > per_node and gpus % per_node:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {per_node}: set --gpus-per-node")
    if gpus % parts:
        raise ValueError(f"{gpus} GPUs are no multiple of --tensor-parallel-size {parts}")
    if gpus > per_node and per_node % parts:
        raise ValueError(
            f"--tensor-parallel-size {parts} spans nodes of {per_node} GPUs, which is not planned: use a divisor of "
            "them or ZeRO-3"
        )
    cfg.check_divides(parts)
    if tokens is not None and not 1 <= tokens <= length:
        raise ValueError(f"--caption-tokens {tokens} must lie in [1, {length}], the context length of {flags.model}")


def describe(setting: Setting, spec: RunSpec) -> str:
    """Return the report on a setting."""
    memory, phases = memory_of(setting), phases_of(setting)
    total = sum(phase.exposed for phase in phases)
    cached = counted(setting.cached, "cached micro-batch", "cached micro-batches")
    profiles = (setting.gpu, setting.link) if setting.nodes > 1 else (setting.gpu,)
    lines = [
        f"{setting.gpus} x {setting.gpu.name}, {counted(setting.nodes, 'host')}"
        + (f", {setting.link.name} between them" if setting.nodes > 1 else ""),
        *(f"  {profile.name}: {profile.source}" for profile in profiles),
        f"{spec.batch}; {spec.zero_in_words}, {'checkpointing, ' if setting.checkpointing else ''}"
        f"{setting.precision}, {cached}, loss {setting.loss}, "
        f"{'two-level' if setting.two_level else 'flat'} ring",
        "",
        "memory per GPU",
        *(f"  {name:<22}{shown_bytes(size):>11}" for name, size in memory.items()),
        f"  {'usable':<22}{shown_bytes(setting.gpu.usable_bytes):>11}: "
        + ("it fits" if fits_gpu(setting) else "it does NOT fit"),
        "",
        "host memory per GPU",
        *(f"  {name:<22}{shown_bytes(size):>11}" for name, size in host_parts(setting).items()),
        f"  {'a host, ' + counted(setting.ranks_of_host, 'GPU'):<22}"
        f"{shown_bytes(host_bytes(setting, setting.ranks_of_host)):>11}",
        "",
        f"{'a step':<24}{'seconds':>9}{'exposed':>10}",
        *(
            f"  {phase.name:<22}{phase.seconds:>9.3f}{phase.exposed:>10.3f}"
            + (f"  overlaps {phase.overlaps}" if phase.overlaps else "")
            for phase in phases
        ),
        f"  {'total':<31}{total:>10.3f}",
        f"  {setting.global_batch / total:,.0f} samples/s, {setting.global_batch / total / setting.gpus:,.0f} per GPU",
        "",
        f"largest global batch that fits with this micro-batch: {largest_batch(setting.with_(resident=1)):,}",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for a usage error or a disk error."""
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except (OSError, ValueError) as error:
        print(f"infcl.plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(argv: list[str]) -> None:
    target = parser().parse_known_args(argv)[0].measure
    if target is None:
        print(describe(*setting_of(argv)))
        return
    from infcl.plan.measure import measure

    if not target.absolute().parent.is_dir():
        raise ValueError(f"--measure {target}: there is no folder {target.parent}")
    profile = dataclasses.asdict(measure())
    target.write_text(json.dumps(profile, indent=2) + "\n")
    print(f"wrote {target}: {', '.join(f'{name} {value}' for name, value in profile.items())}")


if __name__ == "__main__":
    sys.exit(main())
