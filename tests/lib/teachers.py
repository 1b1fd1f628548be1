"""A small teacher of other widths than the demo's model, and the demo's shards with its stored embeddings."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch

from infcl.convert.export import export_model
from infcl.data.tokenizer import Tokenizer, ids_of
from infcl.models import CLIP, load_model_config
from infcl.models.config import parse_model_config
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.shard_files import write_tar

WIDTH = 40


def write_teacher(folder: Path, demo_folder: Path, *, image_size: int = 32) -> str:
    """Export a random model with the demo's tokenizer, a shorter context and a sharp scale; return its folder."""
    fields = load_model_config(GOLDEN_MODEL).to_dict() | {"embed_dim": WIDTH}
    fields["vision_cfg"] |= {"image_size": image_size, "patch_dropout": 0.5}
    fields["text_cfg"] |= {"context_length": 12}
    tokenizer = demo_folder / "tokenizer.model"
    cfg = parse_model_config(fields).with_tokenizer(**ids_of(Tokenizer(tokenizer, 12)))
    torch.manual_seed(11)
    model = CLIP(cfg, init_logit_scale=float(np.log(30)))
    return str(export_model(model.state_dict(), cfg, tokenizer, folder))


def as_npy(rows: np.ndarray) -> bytes:
    """Return an array as np.save writes it."""
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def with_embeddings(source: Path, folder: Path, name: str = "t") -> str:
    """Copy shards, with random embeddings of each sample as the members KEY.NAME.npy; return the folder."""
    generator = np.random.default_rng(3)
    for path in sorted(source.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = [(info.name, tar.extractfile(info).read()) for info in tar]
        keys = dict.fromkeys(name.partition(".")[0] for name, _ in members)
        rows = {key: generator.standard_normal((2, WIDTH)).astype(np.float16) for key in keys}
        members += [(f"{key}.{name}.npy", as_npy(rows[key])) for key in keys]
        write_tar(folder / path.name, sorted(members))
    return str(folder)


def metrics(run: Path) -> list[dict]:
    """Return the records of training steps of a run folder."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]
