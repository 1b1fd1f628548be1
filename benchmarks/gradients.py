"""The gradients of one step, loss beside loss: `python -m benchmarks.gradients --out docs/results`.

The demo model's initial weights (or --weights of a run or export), the same batch of the demo data, and each loss over
--ranks processes: gloo on CPUs, NCCL with --device cuda. Each rank encodes its share, takes the loss, and the gradients
of its towers are averaged over the ranks, as ZeRO does. Reference: the definition (two cross entropies of the whole
matrix) with towers and features in float64, in one process. A row per loss:

    image, text, scale   |gradient - reference| / |reference| of each tower's parameters together, and of logit_scale
    from_clip            |gradient - that of loss clip| / |that of loss clip|, all parameters
    tile_dtype           of the loss's products: of infcl --tile-dtype, of the dense losses that of the features, fp32
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.clock import hardware
from benchmarks.rows import append
from benchmarks.spawn import on_ranks
from infcl.config import TrainConfig, parse_args, resolve
from infcl.convert.import_weights import load_pretrained
from infcl.data.config import DataConfig
from infcl.data.demo import prepare_demo
from infcl.data.loader import TrainLoader
from infcl.data.plan import Share
from infcl.loss.contrastive import TILED, ContrastiveLoss
from infcl.models.build import build_towers
from infcl.models.clip import CLIP
from infcl.train.build import build_tokenizer_and_model_config

LOSSES = ("clip", "open_clip", "disco", "inf_cl")
PARTS = ("image", "text", "scale")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of accuracy_gradients.csv; rows are appended")
    parser.add_argument("--work", type=Path, default=Path(".data"), help="folder of the data set")
    parser.add_argument("--num-train", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1024, help="global batch")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--weights", default=None, help="of the model; default: its initial weights, seed 0")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--autocast", action="store_true", help="towers under bf16 autocast")
    parser.add_argument("--tile-dtype", default="auto", help="of infcl's products; auto: as the trainer's")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    if options.batch % options.ranks:
        parser.error(f"--batch {options.batch} is no multiple of --ranks {options.ranks}")
    data = prepare_demo(options.work / f"demo_{options.num_train}", num_train=options.num_train)
    on_ranks(_compare, options.ranks, options, data)


def _compare(rank: int, options: argparse.Namespace, data: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cuda": "nccl", "cpu": "gloo"}[options.device]
    dist.init_process_group(backend)
    config = _config(options, data)
    tile_dtype = resolve(config, device=options.device).tile_dtype
    model, (images, texts) = _model_and_batch(config, options)
    model, images, texts = model.to(device), images.to(device), texts.to(device)
    own = slice(rank * len(texts) // options.ranks, (rank + 1) * len(texts) // options.ranks)
    gradients = {
        name: loss_gradients(
            model, images[own], texts[own], name, dist.group.WORLD, autocast=options.autocast, tile_dtype=tile_dtype
        )
        for name in LOSSES
    }
    if rank == 0:
        reference = dense_gradients(model.double(), images, texts)
        for name, found in gradients.items():
            row = {"loss": name, "ranks": options.ranks, "global_batch": options.batch}
            row |= {"weights": "initial" if options.weights is None else "trained"}
            row |= {"precision": config.precision, "tile_dtype": tile_dtype if name in TILED and tile_dtype else "fp32"}
            row |= {part: _difference(found[part], reference[part]) for part in PARTS}
            row |= {"from_clip": _difference(_all(found), _all(gradients["clip"]))}
            append(options.out / "accuracy_gradients.csv", [row | hardware(options.commit)])
            print(
                "  ".join(
                    f"{key} {value:.2e}" if isinstance(value, float) else str(value) for key, value in row.items()
                )
            )
    dist.barrier()
    dist.destroy_process_group()


def _config(options: argparse.Namespace, data: Path) -> TrainConfig:
    """Of a training that would take these gradients."""
    flags = ["--train-data", f"{data}/train", "--tokenizer", f"{data}/tokenizer.model", "--model", "demo"]
    flags += ["--precision", "amp_bf16" if options.autocast else "fp32", "--tile-dtype", options.tile_dtype]
    return parse_args(flags)


def _model_and_batch(
    config: TrainConfig, options: argparse.Namespace
) -> tuple[CLIP, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a whole global batch, the same on all ranks."""
    tokenizer, model_config = build_tokenizer_and_model_config(config)
    torch.manual_seed(0)
    assert config.train_data is not None and tokenizer is not None, "in the flags"
    model = build_towers(model_config)
    load_pretrained(model, options.weights, None, None)
    loader = TrainLoader(
        DataConfig(config.train_data, workers=0),
        tokenizer,
        Share(options.batch, 1, rank=0, world_size=1),
        image_size=model_config.vision_cfg.image_size,
        seed=0,
    )
    (micro_batch,) = next(iter(loader))
    return model, (micro_batch["images"], micro_batch["texts"])


def loss_gradients(
    model: CLIP,
    images: torch.Tensor,
    texts: torch.Tensor,
    name: str,
    group: dist.ProcessGroup | None,
    *,
    autocast: bool = False,
    tile_dtype: str | None = None,
) -> dict[str, torch.Tensor]:
    """Of this rank's share of a batch through loss `name`, averaged over `group`: {part: float64 vector}."""
    model.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        features = model(images, texts)
    loss = ContrastiveLoss(name, group=group, tile_dtype=tile_dtype)
    loss(features["image_features"], features["text_features"], features["logit_scale"].exp()).backward()
    found = _parts(model)
    for gradient in found.values():
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return found


def dense_gradients(model: CLIP, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a whole batch, by the definition, in the model's precision: {part: float64 vector}."""
    model.zero_grad()
    dtype = model.logit_scale.dtype
    image = F.normalize(model.visual(images), dim=-1)
    text = F.normalize(model.encode_text(texts), dim=-1)
    assert image.dtype == text.dtype == dtype
    logits = model.logit_scale.exp() * image @ text.T
    labels = torch.arange(len(logits), device=logits.device)
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    return _parts(model)


def _parts(model: CLIP) -> dict[str, torch.Tensor]:
    vectors: dict[str, list[torch.Tensor]] = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        part = "scale" if name == "logit_scale" else "image" if name.startswith("visual.") else "text"
        if parameter.grad is not None:
            vectors[part].append(parameter.grad.double().flatten())
    return {part: torch.cat(vector) for part, vector in vectors.items()}


def _all(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parts[part] for part in PARTS])


def _difference(found: torch.Tensor, reference: torch.Tensor) -> float:
    return ((found - reference).norm() / reference.norm()).item()


if __name__ == "__main__":
    main()
