"""The demo with each preset: `python -m benchmarks.demo --presets zero1,zero3 --csv docs/results/demo.csv`.

launch/demo.sh, which `make train` runs, once for each preset, one after the other; a row of what its summary says, and
on how many ranks. Seconds of training are of this machine as busy as it was. benchmarks.results draws the table.
Other flags are pretrain_clip.py's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.clock import hardware
from benchmarks.rows import append
from benchmarks.step import end_process
from infcl.config import TrainConfig, resolve

PRESETS = ("zero1", "zero2", "zero3", "zero3_offload", "zero2_bf16")
TAKEN = ("zero_shot_top1", "image_to_text_r1", "text_to_image_r1", "train_seconds", "steps", "skipped_steps")


def main(arguments: list[str] | None = None) -> int:
    """The first exit code of a demo that failed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--presets", default=",".join(PRESETS), help="of ds_configs, comma-separated")
    parser.add_argument("--data", type=Path, default=Path(".data/demo"), help="folder of the demo's data set")
    parser.add_argument("--csv", type=Path, default=None, help="append the rows to this file")
    parser.add_argument("--commit", default=None, help="for the CSV; default: git's HEAD")
    options, flags = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks.demo: ended by SIGTERM"))
    for preset in options.presets.split(","):
        with tempfile.TemporaryDirectory() as logs:
            code = train(preset, options.data, Path(logs), flags)
            if code:
                print(f"{preset}: exit code {code}", file=sys.stderr)
                return code
            row = row_of(preset, Path(logs) / preset) | hardware(options.commit)
        print(row, flush=True)
        append(options.csv, [row])
    return 0


def train(preset: str, data: Path, logs: Path, flags: list[str]) -> int:
    """launch/demo.sh's exit code. It ends with this process (SIGTERM, Ctrl-C)."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "DATA": str(data.absolute()), "LOGS": str(logs), "PRESET": preset, "NAME": preset}
    process = subprocess.Popen(command(flags), env=os.environ | given, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        end_process(process)
        raise


def command(flags: list[str]) -> list[str]:
    return ["bash", "launch/demo.sh", *flags]


def row_of(preset: str, run: Path) -> dict:
    summary, flags = (json.loads((run / name).read_text()) for name in ("summary.json", "config.json"))
    given = {name: flags[name] for name in ("deepspeed_config", "precision")}
    config = TrainConfig(dataset_type="synthetic", train_num_samples=1, **given)
    precision = resolve(config, device="cuda" if torch.cuda.is_available() else "cpu").precision
    pairs = summary["samples_seen"] // summary["steps"]
    sizes = {"ranks": summary["world_size"], "precision": precision, "global_batch": pairs}
    return {"preset": preset} | sizes | {name: summary[name] for name in TAKEN}


if __name__ == "__main__":
    sys.exit(main())
