"""Write a model that other programs can load, from a run (export) or from other weights (import).

    python -m infcl.convert export RUN [--format open_clip|hf] [--no-ema]
    python -m infcl.convert import WEIGHTS --out FOLDER [--model CONFIG] [--format ...]

No GPU is needed. infcl/convert/export.py describes the formats; infcl/convert/import_weights.py lists the sources.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infcl.checkpoint.load import newest_intact, takes_average, weights_of
from infcl.config import OneLineParser
from infcl.config.json_file import read_record
from infcl.convert.export import FORMATS, export_model
from infcl.convert.import_weights import config_of, model_with, read_weights
from infcl.data.tokenizer.source import stored_tokenizer
from infcl.models import load_any_config
from infcl.models.config import ModelConfig


class _Finished(TypedDict, total=False):
    """What is read of summary.json."""

    steps: int
    ema: bool
    evaluation: dict[str, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit code: 0, or 2 for a usage error or a disk error, with one line on stderr.
    """
    args = _parser().parse_args(arguments)
    try:
        out, cfg = _export(args) if args.command == "export" else _import(args)
    except (OSError, ValueError) as error:
        print(f"infcl.convert {args.command}: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m infcl.convert", description="Write a model for other programs to load.")
    commands = parser.add_subparsers(dest="command", required=True)
    both = OneLineParser(add_help=False)
    both.add_argument("--name", help="title of the model card [name of the folder]")
    both.add_argument("--format", choices=FORMATS, default="open_clip", help="who loads it [open_clip]")
    export = commands.add_parser("export", parents=[both], help="a run of pretrain_clip.py")
    export.add_argument("run", type=Path, help="run folder; its last checkpoint is exported")
    export.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="the averaged weights of a run, or not [if it has them (--ema-decay)]",
    )
    export.add_argument("--out", type=Path, help="folder to write [RUN/export; RUN/export-FORMAT for other formats]")
    imported = commands.add_parser("import", parents=[both], help="weights of open_clip, transformers or OpenAI")
    imported.add_argument("weights", type=Path, help="file or folder, as --pretrained reads them")
    imported.add_argument("--model", help="name or JSON file of the model, for a file of weights alone")
    imported.add_argument("--out", type=Path, required=True, help="folder to write")
    return parser


def _export(args: argparse.Namespace) -> tuple[Path, ModelConfig]:
    if not (args.run / "model_config.json").is_file():
        raise ValueError(f"{args.run} is no run folder: a run writes model_config.json and checkpoints/ there")
    cfg = load_any_config(args.run / "model_config.json")
    checkpoint, manifest = newest_intact(args.run)
    ema = takes_average(manifest, args.ema)
    out = export_model(
        weights_of(checkpoint, manifest, ema=ema),
        cfg,
        stored_tokenizer(args.run, cfg),
        args.out or args.run / ("export" if args.format == "open_clip" else f"export-{args.format}"),
        format=args.format,
        name=args.name or args.run.resolve().name,
        card=_summary(args.run, manifest["trainer"], ema=ema),
    )
    return out, cfg


def _import(args: argparse.Namespace) -> tuple[Path, ModelConfig]:
    weights = read_weights(args.weights)
    cfg = config_of(weights, args.weights, args.model)
    if args.out.resolve() == args.weights.resolve():
        raise ValueError(f"--out {args.out} is the folder of the weights: choose another")
    name, model = args.name or args.weights.resolve().stem, model_with(weights, cfg)
    tokenizer = stored_tokenizer(args.weights, model.cfg)
    return export_model(model.state_dict(), model.cfg, tokenizer, args.out, format=args.format, name=name), cfg


def _summary(run: Path, trained: Mapping[str, Any], *, ema: bool) -> dict[str, object]:
    """Return summary.json of a finished run, or `trained` if the exported checkpoint is not the run's last.

    The evaluation is left out if it used other weights than the export: averaged ones or the model's own.
    """
    finished = run / "summary.json"
    summary: dict[str, Any] = {**read_record(finished, _Finished)} if finished.is_file() else {}
    summary = (summary if summary.get("steps") == trained["step"] else {}) | {**trained, "steps": trained["step"]}
    if summary.get("ema", False) != ema:
        summary.pop("evaluation", None)
    summary["ema"] = ema
    return summary | {"paths": {"run": str(run)}}  # a run folder may have been moved


if __name__ == "__main__":
    sys.exit(main())
