"""Parse the command line to a TrainConfig, with an argparse parser made from the dataclass's fields."""

import argparse
import ast
import dataclasses
import difflib
import sys
import typing
from pathlib import Path
from typing import Any

from infcl.config.agreement import OF_ONE_START
from infcl.config.checks import validate
from infcl.config.json_file import read_record
from infcl.config.open_clip_flags import ACCEPTED, EQUIVALENTS
from infcl.config.settings import TrainConfig, option_of, shown_default

ALTERNATIVES = (("steps", "epochs"), ("accum_freq", "global_batch_size"))


def parse_args(argv: list[str] | None = None, **fixed: Any) -> TrainConfig:
    """Parse and validate the command line.

    Args:
        argv: the flags; None: those of sys.argv.
        fixed: fields that have these values, whatever the command line says.

    Raises:
        ValueError: for a wrong flag or value, with argparse's or `validate`'s message.
    """
    parser = make_parser()
    started_from = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    started_from.add_argument("--config")
    if path := started_from.parse_known_args(argv)[0].config:
        given = {text.partition("=")[0] for text in (sys.argv[1:] if argv is None else argv)}
        dropped = {b for pair in ALTERNATIVES for a, b in (pair, pair[::-1]) if option_of(a) in given}
        parser.set_defaults(**{name: v for name, v in _settings_of_run(path).items() if name not in dropped})
    arguments = vars(parser.parse_args(argv))
    for of_no_field in ("config", "local_rank", "deepspeed", "ignored"):
        arguments.pop(of_no_field)
    if not isinstance(arguments["aug_cfg"], dict):  # --config has it parsed already
        arguments["aug_cfg"] = _parse_aug_cfg(arguments["aug_cfg"])
    config = TrainConfig(**arguments | fixed)
    validate(config)
    return config


def _settings_of_run(path: str) -> dict[str, Any]:
    """Return the settings of a run's config.json for a new run, without those that belong to that run (OF_ONE_START).

    Raises:
        ValueError: the file cannot be read, or has a setting that does not exist.
    """
    try:
        read_record(Path(path), TrainConfig, extra="forbid")
        given = read_record(Path(path), dict)
    except ValueError as error:
        raise ValueError(f"--config {error}") from None
    return {name: value for name, value in given.items() if name not in OF_ONE_START}


class OneLineParser(argparse.ArgumentParser):
    """ArgumentParser that reports a usage error in one line, without the usage block."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ValueError instead of exiting, so that the caller decides which rank prints."""

    def error(self, message: str):
        raise ValueError(f"{message} (see --help)")

    def parse_args(self, args=None, namespace=None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hints = [hint for text in unknown if (hint := self._hint(text))]
            self.error(f"unrecognized arguments: {' '.join([*unknown, *hints])}")
        return arguments

    def _hint(self, text: str) -> str:
        """Return what to give instead of another trainer's flag, or the known flag with the closest spelling, or ""."""
        flag = text.partition("=")[0]
        dashed = flag.replace("_", "-")
        if dashed in EQUIVALENTS:
            return f"({flag}, here: {EQUIVALENTS[dashed]})"
        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        close = difflib.get_close_matches(dashed, known, n=1, cutoff=0.75) if flag[:2] == "--" else []
        return f"({flag}: did you mean {close[0]}?)" if close else ""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags, with their --help. It raises ValueError for usage errors."""
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
            help += f" [{shown_default(default)}]"
        spellings = [option_of(entry.name)] + (["--micro-batch-size"] if entry.name == "batch_size" else [])
        if entry.name == "deepspeed_config":
            spellings.append("--deepspeed-config")
        if default in (None, False, []):
            unset = parser.add_argument("--no-" + option_of(entry.name)[2:], dest=entry.name, action="store_const")
            unset.const, unset.default, unset.help = default, default, argparse.SUPPRESS
        if entry.type is bool:
            options["action"] = "store_true"
        else:
            options.setdefault("type", _value_type(entry.type))
            if "choices" not in options:
                options.setdefault("metavar", {float: "X", str: "S"}.get(options["type"], "N"))
        group.add_argument(*spellings, dest=entry.name, default=default, help=help, **options)
    help = "begin with the flags of another run's config.json; --no-NAME takes out one that has no default"
    parser.add_argument("--config", metavar="S", help=help)
    for name in ACCEPTED:
        action = "store" if name.endswith("=") else "store_true"
        parser.add_argument(name.rstrip("="), dest="ignored", action=action, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # accepted and ignored
    return parser


def _value_type(annotation: Any) -> type:
    """Return int, float or str for int | None, float | None and other annotations."""
    kinds = typing.get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if kind in (int, float)), str)


def _parse_aug_cfg(pairs: list[str]) -> dict:
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            result[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"--aug-cfg {pair!r} is not KEY=VALUE with a number or a (low,high) pair") from None
    return result
