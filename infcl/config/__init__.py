"""The configuration of a run: command line -> one frozen dataclass -> checked numbers.

The dataclass is the single source: `parse_args` derives argparse from its fields, and `config.json` in the run folder
is the same fields again. Refusing a wrong flag needs no device and no other rank.

settings: the fields; checks: what is refused; command_line: argparse; batch: pairs of a step, steps of a run;
agreement: what all hosts must have been given alike.
"""

from infcl.config.agreement import settings_of
from infcl.config.batch import BatchPlan, counted, total_steps
from infcl.config.checks import PATHS, parse_factors, validate
from infcl.config.command_line import make_parser, parse_args
from infcl.config.settings import LOSS_NAMES, TrainConfig, option_of

__all__ = [
    "LOSS_NAMES",
    "PATHS",
    "BatchPlan",
    "TrainConfig",
    "counted",
    "make_parser",
    "option_of",
    "parse_args",
    "parse_factors",
    "settings_of",
    "total_steps",
    "validate",
]
