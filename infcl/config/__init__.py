"""The configuration of a run: command line -> flags (TrainConfig) -> resolved run (RunSpec), both frozen.

The dataclass is the single source: `parse_args` derives argparse from its fields, and `config.json` in the run folder
stores the same fields. Rejecting a wrong flag needs no device and no other rank.

settings: the fields; checks: validation; command_line: argparse; batch: samples per step, steps per run;
preset: ZeRO presets; spec: the resolved run; agreement: settings that must be equal on all nodes;
words: how numbers are shown; disk: files that are replaced atomically.
"""

from infcl.config.agreement import settings_of
from infcl.config.batch import BatchPlan, total_steps
from infcl.config.checks import parse_factors, validate
from infcl.config.command_line import OneLineParser, make_parser, parse_args
from infcl.config.settings import CAPTIONS, LOSS_NAMES, TrainConfig, option_of, teacher_in_words
from infcl.config.spec import RunSpec, may_pack, resolve
from infcl.config.words import aligned, counted, shown_bytes, shown_seconds
