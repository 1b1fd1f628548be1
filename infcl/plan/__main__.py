"""python -m infcl.plan --model ViT-L-14 --gpus 32 --gpu a800-80g --global-batch 12288k --zero 3 ...

Print memory by part, the phases of a step, samples/s, the largest batch and the fastest settings. --sweep gpus=8:4096
prints the scaling curve; --measure FILE writes a profile of this machine (measure.py). Figures are estimates:
docs/benchmarks/planner.md.
"""

import argparse
import csv
import dataclasses
import json
import sys
from pathlib import Path

from infcl.config import OneLineParser, counted
from infcl.config.preset import stage_in_words
from infcl.models.config import load_model_config
from infcl.plan.memory import host_bytes, host_parts, memory_of
from infcl.plan.profile import load_gpu, load_link
from infcl.plan.search import fastest, fits, fits_gpu, fits_host, largest_batch, micro_batches, resolved, sweep
from infcl.plan.setting import Setting, captions_of
from infcl.plan.timing import phases_of, samples_per_second


def read_batch(text: str) -> int:
    """Parse a number of samples: '12288k' -> 12288 * 1024; 'm' is 1024k."""
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of samples, like 32768, 32k or 4m")
    return int(digits) * factor


def parser() -> argparse.ArgumentParser:
    flags = OneLineParser(prog="python -m infcl.plan", description=__doc__.split("\n\n")[1])
    flags.add_argument("--model", default="ViT-L-14")
    flags.add_argument("--gpus", type=int, default=8)
    flags.add_argument("--gpus-per-node", type=int, default=8)
    flags.add_argument("--host-memory-gib", type=float, help="of a node; without it everything is taken to fit")
    flags.add_argument("--gpu", default="h200", help="profile of infcl/plan/profiles/gpus, or a file of --measure")
    flags.add_argument("--link", default="nic-400", help="profile of infcl/plan/profiles/links, or a file like them")
    flags.add_argument(  # where a flag has two spellings, the second is the trainer's
        "--global-batch", "--global-batch-size", type=read_batch, default=read_batch("32k"), help="samples, like 12288k"
    )
    flags.add_argument(
        "--micro-batch-size", "--batch-size", default="auto", help="samples per GPU and micro-batch; auto: the fastest"
    )
    flags.add_argument("--caption-tokens", type=int, help="of a packed caption, on average; default: padded captions")
    flags.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    flags.add_argument("--grad-checkpointing", action="store_true", help="recompute activations in the backward pass")
    flags.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    flags.add_argument("--pixel-cache-gb", default="auto", choices=("auto", "gpu"), help="auto: pixels in host memory")
    flags.add_argument(
        "--resident-micro-batches",
        default="auto",
        help="micro-batches that cache their activations; auto: as many as fit",
    )
    flags.add_argument("--compile-blocks", default="auto", choices=("auto", "on", "off"), help="auto: on")
    flags.add_argument("--precision", default="amp_bf16", choices=("amp_bf16", "bf16", "fp16", "fp32"))
    flags.add_argument(
        "--attention", default="auto", choices=("auto", "torch", "triton"), help="whose kernels the towers have"
    )
    flags.add_argument("--loss", default="inf_cl", choices=("inf_cl", "clip", "open_clip"))
    flags.add_argument("--ring", default="auto", choices=("auto", "flat", "two-level"))
    flags.add_argument("--tensor-parallel-size", type=int, default=1)
    flags.add_argument("--sequence-parallel", action="store_true", help="with --tensor-parallel-size above 1")
    flags.add_argument("--sweep", help="gpus=8:4096: the batch per GPU stays, the GPUs double up to the last")
    flags.add_argument("--measure", type=Path, help="measure this machine's first GPU, write its profile, and exit")
    return flags


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Return the setting of the flags; with --micro-batch-size auto, the fastest one that fits.

    Raises:
        ValueError: the flags contradict each other or the model.
    """
    model = load_model_config(arguments.model)
    length, tokens = model.text_cfg.context_length, arguments.caption_tokens
    if tokens is not None and not 1 <= tokens <= length:
        raise ValueError(
            f"--caption-tokens {tokens} must lie in [1, {length}], the context length of {arguments.model}"
        )
    size = _number("--micro-batch-size", arguments.micro_batch_size)
    alike = "gpus gpus_per_node host_memory_gib global_batch zero loss ring precision attention sequence_parallel"
    setting = Setting(
        **captions_of(model, tokens),
        **{name: getattr(arguments, name) for name in alike.split()},
        gpu=load_gpu(arguments.gpu),
        link=load_link(arguments.link),
        micro_batch=size or max(1, arguments.tensor_parallel_size),
        checkpointing=arguments.grad_checkpointing,
        compiled=arguments.compile_blocks != "off",
        resident=_number("--resident-micro-batches", arguments.resident_micro_batches) or 0,
        offloads=("optimizer",) if arguments.offload else (),
        pixels="device" if arguments.pixel_cache_gb == "gpu" else "host",
        tensor_parallel=arguments.tensor_parallel_size,
    )
    setting.check()
    if size:
        return setting
    choices = [setting.with_(micro_batch=size) for size in micro_batches(setting)]
    fitting = [choice for choice in choices if fits(resolved(choice))]
    return max(fitting, key=lambda choice: samples_per_second(resolved(choice)), default=choices[-1])


def _number(flag: str, text: str) -> int | None:
    """Return the number of a flag, or None for auto."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise ValueError(f"{flag} {text} must be a number greater than 0, or auto")
    return int(text)


def describe(asked: Setting) -> str:
    """Return the report on a setting."""
    setting = resolved(asked)
    memory, phases = memory_of(setting), phases_of(setting)
    total = sum(phase.exposed for phase in phases)
    largest = largest_batch(setting.with_(resident=asked.resident))
    cached = counted(setting.cached, "cached micro-batch", "cached micro-batches")
    profiles = (setting.gpu, setting.link) if setting.nodes > 1 else (setting.gpu,)
    lines = [
        f"{setting.gpus} x {setting.gpu.name}, {counted(setting.nodes, 'host')}"
        + (f", {setting.link.name} between them" if setting.nodes > 1 else ""),
        *(f"  {profile.name}: {profile.source}" for profile in profiles),
        f"{setting.global_batch:,} samples per step = {counted(setting.dp_size, 'data-parallel rank')} x "
        f"{setting.num_micro_batches} x {setting.micro_batch}; {stage_in_words(asked.zero, setting.zero)}, "
        f"{'checkpointing, ' if setting.checkpointing else ''}"
        f"{setting.precision}, {cached}, loss {setting.loss}, "
        f"{'two-level' if setting.two_level else 'flat'} ring",
        "",
        "memory per GPU",
        *(f"  {name:<22}{size / 2**30:>9.2f} GiB" for name, size in memory.items()),
        f"  {'usable':<22}{setting.gpu.usable_bytes / 2**30:>9.2f} GiB: "
        + ("it fits" if fits_gpu(setting) else "it does NOT fit"),
        "",
        "host memory per GPU",
        *(f"  {name:<22}{size / 2**30:>9.2f} GiB" for name, size in host_parts(setting).items()),
        f"  {'a host, ' + counted(setting.ranks_of_host, 'GPU'):<22}"
        f"{host_bytes(setting, setting.ranks_of_host) / 2**30:>9.2f} GiB: {_of_host(setting)}",
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
        f"largest global batch that fits with this micro-batch: {largest:,}",
        "fastest settings for this batch",
    ]
    best = [
        f"  {setting.global_batch / seconds:>9,.0f} samples/s  {_short(other)}"
        for seconds, other in fastest(setting.with_(resident=asked.resident))
    ]
    return "\n".join(lines + (best or ["  none fits: it takes more GPUs, or a smaller batch"]))


def _of_host(setting: Setting) -> str:
    """Return whether a node's memory suffices, in words."""
    gib = setting.host_memory_gib
    if gib is None:
        return "pass --host-memory-gib to check whether it fits"
    if not fits_host(setting, gib):
        return f"it does NOT fit into {gib:g}"
    rest = "" if fits_host(setting, gib, pixels=True) else ", except pixels, which are read again then"
    return f"it fits into {gib:g}{rest}"


def _short(setting: Setting) -> str:
    words = [f"micro-batch {setting.micro_batch}", f"ZeRO-{setting.zero}"]
    words += ["checkpointing"] if setting.checkpointing else []
    words += [f"{setting.cached} cached micro-batches"] if setting.cached > 1 else []
    if setting.offload:
        words.append(f"offload (a host: {host_bytes(setting, setting.ranks_of_host) / 2**30:.0f} GiB)")
    words += [f"T={setting.tensor_parallel}"] if setting.tensor_parallel > 1 else []
    words += ["sequence parallel"] if setting.sequence_parallel else []
    return f"{', '.join(words)} ({memory_of(setting)['peak'] / 2**30:.1f} GiB)"


# ---- scaling curves ----


def read_range(text: str) -> list[int]:
    """Parse 'gpus=8:4096' into [8, 16, ..., 4096].

    Raises:
        ValueError: the text has another form, or doubling does not reach the last number.
    """
    name, _, limits = text.partition("=")
    first, _, last = limits.partition(":")
    if name != "gpus" or not (first.isdecimal() and last.isdecimal()) or not 0 < int(first) <= int(last):
        raise ValueError(f"--sweep {text}: write gpus=FIRST:LAST, like gpus=8:4096")
    doublings = (int(last) // int(first)).bit_length() - 1
    sizes = [int(first) << i for i in range(doublings + 1)]
    if sizes[-1] != int(last):
        raise ValueError(
            f"--sweep {text}: the GPUs double: write gpus={first}:{sizes[-1]} or gpus={first}:{2 * sizes[-1]}"
        )
    return sizes


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for a usage error or a disk error."""
    arguments = parser().parse_args(argv)
    try:
        _run(arguments)
    except (OSError, ValueError) as error:
        print(f"infcl.plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    if arguments.measure:
        from infcl.plan.measure import measure

        if not arguments.measure.absolute().parent.is_dir():
            raise ValueError(f"--measure {arguments.measure}: there is no folder {arguments.measure.parent}")
        profile = dataclasses.asdict(measure())
        arguments.measure.write_text(json.dumps(profile, indent=2) + "\n")
        print(f"wrote {arguments.measure}: {', '.join(f'{name} {value}' for name, value in profile.items())}")
        return
    setting = setting_of(arguments)
    if arguments.sweep is None:
        print(describe(setting))
        return
    rows = sweep(setting, read_range(arguments.sweep))
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()})


if __name__ == "__main__":
    sys.exit(main())
