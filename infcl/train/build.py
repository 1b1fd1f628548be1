"""Build the parts of a run from its flags: tokenizer, model, loss, loader, evaluations."""

import dataclasses
import math
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infcl.config import RunSpec, TrainConfig, may_pack, resolve, settings_of, total_steps
from infcl.config.settings import AUTO_WORKERS
from infcl.convert.import_weights import load_pretrained, weights_preprocess
from infcl.data.config import keys_of
from infcl.data.evaluation import EvalConfig
from infcl.data.loader import StepLoader, TrainLoader
from infcl.data.plan import Share
from infcl.data.shards import Shard, expand_shards, index_shards
from infcl.data.synthetic import SyntheticSource
from infcl.data.tokenizer.open_clip import AnyTokenizer, OpenClipTokenizer
from infcl.data.tokenizer.source import find_tokenizer, read_ids
from infcl.engine.schedule import Schedule
from infcl.evaluate.tasks import RetrievalTask, ZeroShotTask
from infcl.evaluate.validation import ValidationLoss
from infcl.kernels import select_tile
from infcl.loss.contrastive import ContrastiveLoss
from infcl.loss.inputs import RingOptions
from infcl.loss.matryoshka import check_widths, matryoshka
from infcl.models.clip import build_towers, lock_towers
from infcl.models.config import ModelConfig, load_any_config
from infcl.models.open_clip_config import hugging_face_config
from infcl.models.preprocess import Preprocess
from infcl.parallel import Parallel, gather_objects, init_parallel, ranks_of_host
from infcl.parallel.collectives import on_every_rank
from infcl.train.teacher import TeacherModel, load_teacher

MOST_WORKERS = 8
Towers = Any  # CLIP, or open_clip's towers behind CLIP's interface (models/open_clip_model.py)


def join(config: TrainConfig) -> Parallel:
    """Start the process group and the groups of tensor parallelism. Collective.

    Raises:
        ValueError: see `init_parallel`.
        RuntimeError: ranks did not join in time.
    """
    parallel = init_parallel(
        config.device,
        timeout_minutes=config.dist_timeout,
        run=config.name or config.model,
        settings=settings_of(config),
    )
    if config.tensor_parallel_size > 1:
        from megatron_patches.groups import init_tensor_parallel

        parallel = init_tensor_parallel(parallel, config.tensor_parallel_size, on_host=may_pack(config))
    return parallel


def workers_for(ranks: int) -> int:
    """Return loader processes per rank, 1 to MOST_WORKERS: the node's cores divided by its ranks, less one."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks - 1))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of a run, before its weights and data exist; a teacher has its weights."""

    spec: RunSpec
    model_config: ModelConfig
    tokenizer: AnyTokenizer | None
    teacher: TeacherModel | None = None

    @property
    def teacher_size(self) -> tuple[int, int]:
        """Parameters of the teacher's model, and the width of its embeddings; zeros without one."""
        if self.teacher is None:
            return 0, self.spec.flags.teacher_member[1]
        model = self.teacher.model
        return sum(parameter.numel() for parameter in model.parameters()), model.cfg.embed_dim


def resolve_inputs(config: TrainConfig, parallel: Parallel) -> Inputs:
    """Resolve the flags on these ranks.

    Raises:
        ValueError: the flags contradict each other, the tokenizer or the model.
    """
    if config.workers == AUTO_WORKERS:
        config = dataclasses.replace(config, workers=workers_for(ranks_of_host(parallel)))
    tokenizer, model_config = build_tokenizer_and_model_config(config)
    spec = resolve(
        config,
        device=parallel.device.type,
        ranks=parallel.dp_size,
        hosts=parallel.hosts,
        unpackable=model_config.text_cfg.why_unpackable,
    )
    return Inputs(spec, model_config, tokenizer, load_teacher(config, model_config))


def build_tokenizer_and_model_config(config: TrainConfig) -> tuple[AnyTokenizer | None, ModelConfig]:
    """Return the tokenizer, if any, and the model config with the flags' overrides and the tokenizer's vocabulary.

    Raises:
        ValueError: model, tokenizer and flags do not match.
    """
    overrides: dict[str, Any] = {
        name: getattr(config, f"force_{name}") for name in ("image_size", "context_length", "patch_dropout")
    }
    model_config = load_any_config(config.model).with_overrides(**overrides)
    flags = {name: getattr(config, f"image_{name}") for name in ("mean", "std", "interpolation", "resize_mode")}
    preprocess = {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items() if v not in (None, [])}
    preprocess = weights_preprocess(config.pretrained_image or config.pretrained, config.model) | preprocess
    model_config = model_config.with_preprocess(preprocess)
    model_config.check_divides(config.tensor_parallel_size)
    if config.matryoshka_widths:
        widths, weights = config.matryoshka_widths, config.matryoshka_weights or None
        check_widths(widths, weights, model_config.embed_dim, name="--matryoshka-widths")
    tokenizer = None
    if config.tokenizer is not None:
        source = find_tokenizer(config.tokenizer, model_config)
        tokenizer = source.open(model_config.text_cfg.context_length)
        model_config = read_ids(model_config, source, tokenizer)
    _check_vocabulary(config, model_config, tokenizer)
    return tokenizer, model_config


def _check_vocabulary(config: TrainConfig, model_config: ModelConfig, tokenizer: AnyTokenizer | None) -> None:
    """Raise ValueError if the text tower has fewer embeddings than there are ids, or a BPE model other ids."""
    text = model_config.text_cfg
    tower, embeddings = "text tower", text.vocab_size
    if text.hf_model_name:
        tower = f"text tower {text.hf_model_name}"
        embeddings = hugging_face_config(text.hf_model_name, config.model).get_text_config().vocab_size
    ids = text.vocab_size if tokenizer is None else tokenizer.vocab_size
    if ids > embeddings or (isinstance(tokenizer, OpenClipTokenizer) and ids != embeddings):
        given = f"--tokenizer {config.tokenizer}" if tokenizer is not None else f"--dataset-type {config.dataset_type}"
        raise ValueError(
            f"{given} has {ids} ids, the {tower} of --model {config.model} has {embeddings} embeddings: use the "
            "tokenizer that belongs to the model, or set text_cfg.vocab_size in its config"
        )


def build_model(config: TrainConfig, model_config: ModelConfig) -> tuple[Towers, list[str]]:
    """Build the model with the flags' locks and load pretrained weights.

    SigLIP's loss starts at scale 10 and bias -10 (Zhai et al. 2023). For the other losses our towers have no bias: a
    softmax cancels it, so it would have no gradient.

    Returns:
        The model, and a line for each loaded set of weights: which, from where.
    """
    siglip = config.loss == "siglip"
    start = {"init_logit_scale": math.log(10)} if siglip else {}
    model_config = model_config.with_logit_bias(-10.0 if siglip else None)
    model = build_towers(model_config, activation_checkpointing=config.grad_checkpointing, **start)
    pretrained = (config.pretrained, config.pretrained_image, config.pretrained_text)
    sources = load_pretrained(model, *pretrained, name=config.model)
    lock_towers(model, config)
    return model, sources


def build_meta_model(config: TrainConfig, model_config: ModelConfig) -> Towers:
    """Build the model on the meta device: parameter names, shapes and locks; checks that pretrained weights match."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")
        return build_model(config, model_config)[0]


def split_model(model: Towers, parallel: Parallel) -> None:
    """Keep only this rank's part of the model, in place, under tensor parallelism; otherwise do nothing."""
    if parallel.tp_group is not None:
        from megatron_patches.towers import split_towers

        split_towers(model, parallel.tp_group)


def build_loss(spec: RunSpec, parallel: Parallel) -> Callable[..., torch.Tensor]:
    """Build the loss of the flags over all ranks; ValueError if --tile does not run on this device."""
    widths, weights = spec.flags.matryoshka_widths, spec.flags.matryoshka_weights
    if not widths:
        return _contrastive_loss(spec, parallel)
    return matryoshka([_contrastive_loss(spec, parallel) for _ in widths], widths, weights or None)


def _contrastive_loss(spec: RunSpec, parallel: Parallel) -> nn.Module:
    """Build the loss of features of one width. Tensor-parallel ranks divide their samples among themselves."""
    config = spec.flags
    select_tile(torch.empty(0, device=parallel.device), tile=config.tile)
    loss = ContrastiveLoss(
        config.loss,
        captions=config.captions_per_image if config.texts_per_image > 1 else None,
        group=parallel.dp_group if parallel.tp_group is None else dist.group.WORLD,
        options=RingOptions(config.tile, spec.tile_dtype, ranks_per_node=parallel.ranks_per_node),
        duplicates=config.duplicates_and_by[0],
        margin=config.false_negative_margin,
        distillation=config.distill_weight,
        fixed_shape=True,
    )
    if parallel.tp_group is None:
        return loss
    from megatron_patches.loss import TensorParallelLoss

    return TensorParallelLoss(loss, parallel.tp_group)


def build_loader(inputs: Inputs, parallel: Parallel) -> StepLoader:
    """Build the loader of the training data. Collective.

    Raises:
        ValueError: on every rank, if the data cannot be used or differs between ranks.
    """
    config, model_config = inputs.spec.flags, inputs.model_config
    share = Share(
        inputs.spec.batch,
        parallel.dp_rank,
        part=parallel.tp_rank,
        parts=parallel.tp_size,
        node_readers=ranks_of_host(parallel),
    )
    image_size = model_config.vision_cfg.image_size
    if config.dataset_type == "synthetic":
        assert config.train_num_samples is not None, "checked with the flags"
        text = model_config.text_cfg
        source = SyntheticSource(
            share,
            image_size=image_size,
            seed=config.seed,
            num_samples=config.train_num_samples,
            context_length=text.context_length,
            vocab_size=text.vocab_size,
            end_id=text.end_id,
            pad_id=text.pad_id,
        )
        return StepLoader(source, share, seed=config.seed)
    assert inputs.tokenizer is not None, "checked with the flags"
    tokenizer = inputs.tokenizer
    indexed = _index_shards(config, parallel) if config.dataset_type == "webdataset" else {}
    options: dict[str, Any] = {"image_size": image_size, "indexed": indexed}
    if inputs.teacher is not None:
        options["teacher"] = inputs.teacher.tokenizer
    loader = on_every_rank(lambda: TrainLoader(config, tokenizer, share, **options))
    _require_same_data(loader, inputs.model_config.preprocess)
    return loader


def _index_shards(config: TrainConfig, parallel: Parallel) -> dict[str, Shard]:
    """Index all shards, each by one rank of this node: nodes may have copies and index caches of their own. Collective.

    Raises:
        ValueError: on every rank, if a shard is missing or cannot be read.
    """

    def own() -> dict[str, Shard]:
        paths = expand_shards(config.train_data or "")
        return index_shards(paths[parallel.local_rank :: ranks_of_host(parallel)], keys_of(config), config.index_cache)

    everyone = gather_objects((socket.gethostname(), on_every_rank(own)))
    return {path: shard for host, part in everyone if host == socket.gethostname() for path, shard in part.items()}


def build_schedule(spec: RunSpec, loader: StepLoader) -> Schedule:
    return Schedule(
        spec.flags,
        global_batch_size=spec.batch.global_batch_size,
        total_steps=total_steps(spec.flags, loader.steps_per_epoch),
        steps_per_epoch=loader.steps_per_epoch,
    )


def _require_same_data(loader: TrainLoader, preprocess: Preprocess) -> None:
    """Raise ValueError on all ranks if one has other data (missing shards, its own copy) than rank 0. Collective."""
    own = {"samples": loader.num_samples, "preprocessing": str(preprocess), **loader.state_dict()}
    everyone = gather_objects((socket.gethostname(), own))
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        if different := [f"{k} {v!r} there, {first[k]!r} here" for k, v in theirs.items() if v != first[k]]:
            raise ValueError(
                f"rank {rank} on {host} has found other data than rank 0 on {first_host}: {'; '.join(different)}. "
                "All nodes need the same shards or tables, the same tokenizer and the same --pretrained"
            )


def build_tasks(inputs: Inputs) -> dict[str, RetrievalTask | ZeroShotTask]:
    """Build the evaluations of the flags, by name.

    Raises:
        ValueError: their data or the tokenizer is missing.
    """
    flags, batch = inputs.spec.flags, inputs.spec.batch
    tasks: dict[str, RetrievalTask | ZeroShotTask] = {}
    if (flags.val_data or flags.zeroshot_data) and inputs.tokenizer is None:
        raise ValueError("--val-data and --zeroshot-data need --tokenizer")
    common: dict[str, Any] = {"tokenizer": inputs.tokenizer, "batch_size": batch.micro_batch_size}
    common["widths"] = flags.matryoshka_widths
    if flags.val_data:
        loss = ValidationLoss(flags.loss, flags.tile, batch.rank_batch_size, inputs.spec.tile_dtype)
        data = EvalConfig.of(flags, flags.val_data, inputs.model_config)
        tasks["retrieval"] = RetrievalTask(data, loss=loss, **common)
    if flags.zeroshot_data:
        files = {name: getattr(flags, f"zeroshot_{name}") for name in ("classnames", "templates")}
        data = EvalConfig.of(flags, flags.zeroshot_data, inputs.model_config)
        tasks["zero_shot"] = ZeroShotTask(data, **files, **common)
    return tasks
