"""The trainers that benchmarks.peers_train starts: the flags of each, and how another's runs in a process of ours.

    open_clip   open_clip_train.main of the installed open_clip_torch; 3.3 was tested; it wants pandas beside it
    inf_clip    inf_clip/train/main.py of a checkout of DAMO-NLP-SG/Inf-CLIP, with the inf_cl in it; d9f2833 was read
    fast_clip   src/training/main.py of a checkout of Optimization-AI/fast_clip; efd89d5 was tested
    eva_clip    EVA-CLIP/rei/training/main.py of a checkout of baaivision/EVA; 5623d08 was tested
    infcl       pretrain_clip.py

The code of others runs as it is, but for what keeps it from starting on one GPU with torch 2.11 and webdataset 1.0:

    a process group   fast_clip and eva_clip make none for a single process, and then ask it for their rank or size:
                      one of a single process is made before they start
    torch._six        left torch in 2.0; eva_clip imports infinity from it, and gets a module with that
    end of a shard    webdataset 1.0 marks it by an item that fast_clip's reader takes for a file: marks are turned off
    model configs     a name that a program does not know (eva_clip: ViT-L-14) comes from infcl/models/configs
    RANK, MASTER_...  inf_clip asks the environment for a group of a single process too: it gets what torchrun gives

inf_clip trains with --infloss, and with its gradient cache where it accumulates, on GPUs alone (its models are in DDP,
its memory is asked of NVML). Its log has means: `Batch (t)` is that of the steps since the line before. A line for each
step would be its time, but for each line it takes the norm of each parameter's gradient and waits for it, some 450
waits for ViT-L-14's, so it logs the first and the last step only. Each step's time is ours: torch's hook behind the
optimizer's step, where the GPU is waited for as the lines of others' logs do. Their mean has to be its log's.

eva_clip's amp_bf16 makes weights and AdamW's states bfloat16; so that these are float32, as the others' are, it gets
amp, float16 with a loss scaler. Its recipes add DeepSpeed, and its EVA02 towers need xformers, and apex for their fused
norms: none of it is run here. It has no compilation, accumulates under DeepSpeed only, and takes the norm of the
gradient for each line of its log, here in each step. fast_clip's objective, FastCLIP-v3 with its README's settings for
CC3M, does not accumulate.
"""

import io
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from infcl.models.config import load_model_config

ROOT = Path(__file__).parent.parent
V3 = (
    "--fastclip --multiply_tau --temperature_scheme global_learnable --lr_tau 2e-4 --lr_tau_scheduler step_thresh "
    "--rho 6.5 --gamma 0.2 --gamma_schedule cosine --gamma_decay_epochs 18"
)
Reader = Callable[[str], list[float]]  # a log -> samples/s of all GPUs, of each step


@dataclass(frozen=True)
class Trainer:
    """A program: what it is started with, and what it lacks. No `module`: it is pretrain_clip.py."""

    flags: Callable[[dict, str, str], list[str]]  # (setting, device, folder) -> those beside `shared_flags`
    module: str = ""  # with its main(flags)
    models: str = ""  # the module with its add_model_config and list_models
    packages: tuple[str, ...] = ()  # that it imports, beside infcl's own
    folders: tuple[str, ...] = ()  # of its checkout, where it is imported from; none: it is installed
    data: Callable[[dict, Path], None] = lambda setting, folder: None  # writes what it trains on
    prepare: Callable[[], None] = lambda: None  # in its process, before it is imported
    reader: Callable[[list[str]], Reader] = lambda flags: rates_of  # made when it starts, asked when it has ended
    autocast: str = "amp_bf16"  # its name of 16-bit autocast over float32 weights
    compiles: bool = True
    accumulates: bool = True


def shared_flags(setting: dict, steps: int) -> list[str]:
    """Those that all programs take, for so many optimizer steps."""
    flags = ["--train-num-samples", str(steps * setting["global_batch"]), "--model", setting["model"]]
    flags += ["--precision", setting["precision"], "--batch-size", str(setting["micro_batch"])]
    flags += ["--workers", str(setting["workers"]), "--epochs", "1", "--name", setting["program"]]
    return [*flags, "--grad-checkpointing"] if setting["checkpointing"] else flags


def train(program: str, flags: list[str]) -> dict[str, list[float]]:
    """Another's trainer in this process and folder. Of each step samples/s; peak GiB. --model may be a JSON file."""
    trainer, flags = TRAINERS[program], list(flags)
    trainer.prepare()
    models, at = import_module(trainer.models), flags.index("--model") + 1
    if flags[at].endswith(".json"):
        models.add_model_config(flags[at])
        flags[at] = Path(flags[at]).stem
    elif flags[at] not in models.list_models():
        models.add_model_config(ROOT / "infcl" / "model_configs")
    rates_of_log, rates = trainer.reader(flags), []
    import_module(trainer.module).main(flags)
    if os.environ.get("RANK", "0") == "0":
        log = next(Path("none").glob(f"{program}*/out.log"))  # eva_clip puts the hour behind the name
        rates = rates_of_log(log.read_text())
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"samples_per_second": rates, "waiting": [], "peak_gib": [peak]}


def rates_of(log: str) -> list[float]:
    """A `Reader` of logs with a line for each step that says its rate."""
    return [float(rate) for rate in re.findall(r"Batch \(t\): \S+, ([\d.e+]+)/s", log)]


def timed(flags: list[str]) -> Reader:
    """Times each optimizer step from here on (the first with all that is before it), and holds their mean to the log's.

    The reader raises RuntimeError where the log says otherwise.
    """
    times = [time.perf_counter()]

    def note(*_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(note)
    numbers = [int(flags[flags.index(name) + 1]) for name in ("--batch-size", "--accum-freq")]
    pairs = math.prod(numbers) * int(os.environ.get("WORLD_SIZE", "1"))

    def rates(log: str) -> list[float]:
        hook.remove()
        seconds = [end - start for start, end in pairwise(times)]
        ours, said = statistics.mean(seconds[1:]), mean_seconds(log)
        if abs(ours - said) > 0.001 + 0.02 * said:  # its log has three decimals
            raise RuntimeError(f"a step took {ours:.4f} s in the mean, but {said} s in the program's log")
        return [pairs / step for step in seconds]

    return rates


def mean_seconds(log: str) -> float:
    """Of the steps behind the first, in inf_clip's log with a line for the first step and one for the last."""
    _, mean = re.findall(r"Batch \(t\): ([\d.]+) LR", log)
    return float(mean)


def _infcl_flags(setting: dict, device: str, folder: str) -> list[str]:
    flags = ["--dataset-type", "synthetic", "--accum-freq", str(setting["accum_freq"]), "--device", device]
    flags += ["--compile-blocks", "on" if setting["blocks"] == "compiled" else "off"]
    return [*flags, "--logs", folder, "--report-to", "none", "--skip-memory-check"]


def _open_clip_flags(setting: dict, device: str, folder: str) -> list[str]:
    flags = ["--dataset-type", "synthetic", "--accum-freq", str(setting["accum_freq"]), "--device", device]
    return flags + _torchcompile(setting) + _local_loss(setting) + LOG


def _inf_clip_flags(setting: dict, device: str, folder: str) -> list[str]:
    flags = ["--dataset-type", "synthetic", "--accum-freq", str(setting["accum_freq"]), "--infloss"]
    return [*flags, *_torchcompile(setting), "--log_dir", "none", "--log-every-n-steps", str(10**9)]


def _fast_clip_flags(setting: dict, device: str, folder: str) -> list[str]:
    shards = _shards(setting)
    flags = ["--train-data", f"{folder}/{{00000..{shards - 1:05d}}}.tar", "--dataset-type", "webdataset"]
    flags += ["--data_size", str(shards * setting["micro_batch"])]
    return flags + V3.split() + _torchcompile(setting) + LOG


def _eva_clip_flags(setting: dict, device: str, folder: str) -> list[str]:
    return ["--dataset-type", "synthetic", *_local_loss(setting), *LOG]


LOG = ["--log-every-n-steps", "1", "--logs", "none"]  # none: no checkpoint, the log in ./none


def _torchcompile(setting: dict) -> list[str]:
    return ["--torchcompile"] if setting["blocks"] == "compiled" else []


def _local_loss(setting: dict) -> list[str]:
    return ["--local-loss", "--gather-with-grad"] if setting["gpus"] > 1 else []


def write_numbered_shards(setting: dict, folder: Path) -> None:
    """What fast_clip reads: black images and one caption, as in synthetic data, and a number of its own for each pair.

    A shard of one micro-batch for each worker, which reads it again and again.
    """
    from PIL import Image
    from webdataset import TarWriter

    size, image = load_model_config(setting["model"]).vision_cfg.image_size, io.BytesIO()
    Image.new("RGB", (size, size)).save(image, "JPEG")
    for shard in range(_shards(setting)):
        with TarWriter(str(folder / f"{shard:05d}.tar"), encoder=False) as writer:
            for number in range(shard * setting["micro_batch"], (shard + 1) * setting["micro_batch"]):
                members = {
                    "jpg": image.getvalue(),
                    "txt": b"Dummy caption",
                    "json": json.dumps({"key": number}).encode(),
                }
                writer.write({"__key__": f"{number:09d}", **members})


def _shards(setting: dict) -> int:
    return max(1, setting["workers"]) * setting["gpus"]


def _prepare_inf_clip() -> None:
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def _prepare_fast_clip() -> None:
    import webdata

    webdata.tar_file_expander = partial(webdata.tar_file_expander, eof_value=None)
    _group_of_one()


def _prepare_eva_clip() -> None:
    sys.modules["torch._six"] = six = ModuleType("torch._six")
    vars(six).update(inf=math.inf)
    _group_of_one()


def _group_of_one() -> None:
    if "WORLD_SIZE" not in os.environ:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


TRAINERS = {  # in the order of rows
    "open_clip": Trainer(
        _open_clip_flags, module="open_clip_train.main", models="open_clip", packages=("open_clip_train", "pandas")
    ),
    "inf_clip": Trainer(
        _inf_clip_flags,
        module="inf_clip.train.main",
        models="inf_clip",
        packages=("pandas", "braceexpand", "ftfy", "pynvml", "regex", "torchvision", "triton"),
        folders=(".",),
        prepare=_prepare_inf_clip,
        reader=timed,
    ),
    "fast_clip": Trainer(
        _fast_clip_flags,
        module="training.main",
        models="fast_clip",
        packages=("pandas", "braceexpand", "ftfy", "regex", "timm", "torchvision"),
        folders=("src", "src/training"),
        data=write_numbered_shards,
        prepare=_prepare_fast_clip,
        accumulates=False,
    ),
    "eva_clip": Trainer(
        _eva_clip_flags,
        module="training.main",
        models="eva_clip",
        packages=("pandas", "einops", "ftfy", "iopath", "regex", "timm", "torchvision", "yaml"),
        folders=("EVA-CLIP/rei",),
        prepare=_prepare_eva_clip,
        autocast="amp",
        compiles=False,
        accumulates=False,
    ),
    "infcl": Trainer(_infcl_flags),
}
