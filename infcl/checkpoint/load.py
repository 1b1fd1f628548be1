"""Find, check and load checkpoints. They resume on any number of ranks and under any ZeRO stage.

The format is safetensors and JSON; nothing is unpickled. write.py writes checkpoints.

    RUN/checkpoints/
      step_00000123/
        state_00000.safetensors ...   rank r stores every W-th parameter, full, FP32: model/NAME, the
                                      optimizer's exp_avg/NAME, exp_avg_sq/NAME, ..., and with EMA ema/NAME
        infcl.json                    counters, data position, and size and sha256 of each file (manifest.py);
                                      written last
      latest                          the name of the last complete checkpoint, for people and scripts

`--resume latest` skips a checkpoint whose size or checksum is wrong and loads the one before it.

DeepSpeed's own format is not used: it relies on pickle, and another world size or stage requires a conversion.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infcl.checkpoint.manifest import CHECKPOINT_NAME, MANIFEST, DamagedCheckpoint, Manifest, check, read_manifest
from infcl.checkpoint.run_folder import RunFolder
from infcl.engine.engine import Engine
from infcl.engine.state import EMA
from infcl.parallel import Parallel, from_first_rank, gather_objects

log = logging.getLogger(__name__)


def complete_checkpoints(run: RunFolder) -> list[Path]:
    """Return the complete checkpoints, newest first. Ignore folders with other names, such as copies."""
    found = [path for path in run.checkpoints.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=checkpoint_step, reverse=True)


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step_"))


def find_checkpoint(resume: str | None, run: RunFolder, parallel: Parallel) -> Path | None:
    """Return the intact checkpoint that `--resume` selects, or None to start from scratch. Collective.

    The ranks share the work of checking. 'latest' selects the run's newest intact checkpoint and logs those that it
    skips. A repeated command that gives another run's checkpoint also selects the run's own newest one.

    Raises:
        ValueError: the run has checkpoints but none is intact; the given one is missing or damaged; the run has other
            checkpoints to continue from.
    """
    if resume is None:
        return None
    if resume != "latest" and not from_first_rank(lambda: _is_given_again(resume, run)):
        problem = _check_together(Path(resume), parallel) or from_first_rank(lambda: _own_ones(Path(resume), run))
        if problem:
            raise ValueError(f"--resume {resume}: {problem}")
        return Path(resume)
    problems = []
    for path in from_first_rank(lambda: complete_checkpoints(run)):
        problem = _check_together(path, parallel)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        if parallel.rank == 0:
            log.warning("checkpoint %s is skipped: %s", path, problem)
    if problems:
        raise ValueError(f"--resume latest: no intact checkpoint in {run.checkpoints} ({'; '.join(problems)})")
    began = from_first_rank(lambda: run.flags().get("resume"))
    if began not in (None, "latest"):
        raise ValueError(f"--resume latest: {run.root} began from {began} and has no checkpoint yet: --resume {began}")
    return None


def _is_given_again(resume: str, run: RunFolder) -> bool:
    """Return whether the run began from this checkpoint of another run and has written its own since."""
    began = run.flags().get("resume")
    if began is None or Path(resume).resolve().parent == run.checkpoints.resolve():
        return False
    return Path(began).resolve() == Path(resume).resolve() and bool(complete_checkpoints(run))


def _own_ones(path: Path, run: RunFolder) -> str | None:
    """Return why the run cannot continue from this checkpoint, or None.

    It cannot if --resume latest and pruning would treat another of the run's checkpoints as the newest.
    """
    own = complete_checkpoints(run)
    if path.resolve().parent != run.checkpoints.resolve():
        if not own:
            return None
        return (
            f"{run.root} has checkpoints of its own, up to {own[0].name}: --resume latest continues it. To continue "
            "from another run's, give another --name"
        )
    step = trainer_state(path)["step"]
    later = [other.name for other in own if checkpoint_step(other) > step]
    if not later:
        return None
    return (
        f"this run continued from there, to {later[0]}: --resume latest continues it. To go back, give another --name, "
        f"or move the later ones away ({', '.join(reversed(later))})"
    )


def trainer_state(path: Path) -> Mapping[str, Any]:
    """Return the training loop's state from an intact checkpoint."""
    return read_manifest(path)["trainer"]


def load_checkpoint(engine: Engine, path: Path) -> Mapping[str, Any]:
    """Load FP32 master weights, optimizer state, averages and counters. Collective.

    The checkpoint may come from another world size or ZeRO stage. Every rank reads every file, one tensor at a time.
    If the checkpoint has no moving average, the average starts from its weights. An average that this run does not
    use is ignored.

    Returns:
        The trainer's state.

    Raises:
        ValueError: the checkpoint has another optimizer, other parameters or other shapes, or lacks tensors.
    """
    manifest = read_manifest(path)
    if manifest["optimizer"] != engine.optimizer_name:
        raise ValueError(f"{path} was written with --opt {manifest['optimizer']}, not {engine.optimizer_name}")
    parameters, buffers = dict(engine.state.parameters()), dict(engine.state.buffers())
    missing = {f"model/{name}" for name in (*parameters, *buffers)}
    missing |= {f"{key}/{name}" for name, parameter in parameters.items() for key in engine.state.keys(parameter)}
    for key, value in _tensors(path, manifest):
        kind, _, name = key.partition("/")
        if name in buffers:
            buffers[name].copy_(value)
            missing.remove(key)
            continue
        if name not in parameters:
            raise ValueError(f"{path}: parameter {name} is not in this model: give the --model and --loss of the run")
        if key not in missing:
            continue  # an unused average, or the optimizer state of a parameter that is locked now
        missing.remove(key)
        state = None if kind == "model" else kind
        shape = tuple(engine.state.shape(parameters[name], state))
        if tuple(value.shape) != shape:
            other = f"{name} has shape {tuple(value.shape)}, this model's has {shape}"
            raise ValueError(f"{path}: {other}: give the --model and --tokenizer of the run")
        engine.state.write(parameters[name], value, state)
    if engine.state.ema_decay is not None and not is_averaged(manifest):
        engine.state.start_average(engine.state.ema_decay)
        missing = {key for key in missing if not key.startswith(f"{EMA}/")}
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} tensors that this run needs are missing, {min(missing)} first "
            "(another model or --loss, or a tower that was locked there)"
        )
    engine.set_counters(manifest["counters"])
    return manifest["trainer"]


def consolidated_state_dict(run: str | Path, *, ema: bool | None = None) -> dict[str, torch.Tensor]:
    """Return FP32 weights on the CPU from a run's newest intact checkpoint, or from a checkpoint folder.

    This works without a process group.

    Args:
        ema: the averages of --ema-decay instead of the trained weights; by default if there are any, as the trainer
            evaluates and exports them.

    Returns:
        {parameter name: full tensor}.

    Raises:
        ValueError: there is no intact checkpoint, or the run kept no averages.
    """
    return weights_of(*newest_intact(run), ema=ema)


def newest_intact(run: str | Path) -> tuple[Path, Manifest]:
    """Return a run's newest intact checkpoint (or the given one) and its manifest. Works without a process group."""
    path = Path(run)
    candidates = [path] if (path / MANIFEST).is_file() else complete_checkpoints(RunFolder(path))
    for candidate in candidates:
        try:
            return candidate, check(candidate)
        except DamagedCheckpoint as damage:
            log.warning("checkpoint %s is skipped: %s", candidate, damage)
    raise ValueError(f"{run}: no intact checkpoint there")


def weights_of(checkpoint: Path, manifest: Manifest, *, ema: bool | None = None) -> dict[str, torch.Tensor]:
    """Return the `consolidated_state_dict` of an intact checkpoint."""
    ema = takes_average(manifest, ema)
    if ema and not is_averaged(manifest):
        raise ValueError(f"{checkpoint} has no averaged weights: it was trained without --ema-decay")
    wanted: dict[str, dict[str, torch.Tensor]] = {"model": {}, EMA: {}}  # frozen parameters have no average
    for key, value in _tensors(checkpoint, manifest):
        kind, _, name = key.partition("/")
        if kind == "model" or (ema and kind == EMA):
            wanted[kind][name] = value
    return wanted["model"] | wanted[EMA]


def is_averaged(manifest: Manifest) -> bool:
    """Return whether a checkpoint has the averages of --ema-decay."""
    return "ema_updates" in manifest["counters"]


def takes_average(manifest: Manifest, ema: bool | None) -> bool:
    """Return `ema`; if it is None, whether there are averages."""
    return is_averaged(manifest) if ema is None else ema


def full_weights(engine: Engine, *, keep: bool, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return the full FP32 weights (ema: their averages) on the CPU. Return {} on ranks without `keep`. Collective."""
    weights = {}
    for name, parameter in engine.state.parameters():
        value = engine.state.read(parameter, EMA if ema else None)
        if keep:
            weights[name] = value.to("cpu", copy=True)
    return weights | ({name: value.to("cpu", copy=True) for name, value in engine.state.buffers()} if keep else {})


# ---- reading ----


def _check_together(path: Path, parallel: Parallel) -> str | None:
    """Return what is wrong with a checkpoint, or None. Each rank checks its share of the files. Collective."""
    problem = None
    try:
        check(path, rank=parallel.rank, world_size=parallel.world_size)
    except DamagedCheckpoint as damage:
        problem = str(damage)
    return next((found for found in gather_objects(problem) if found), None)


def _tensors(path: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for name in sorted(manifest["files"]):
        with safe_open(path / name, framework="pt") as file:
            for key in file.keys():
                yield key, file.get_tensor(key)
