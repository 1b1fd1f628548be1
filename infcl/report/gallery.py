"""Retrieval results with images: the exported model answers a few queries of the run's --val-data on the CPU.

Queries are spread evenly over the candidates, whatever their results. There are as many candidates as a CPU encodes in
a few seconds. Retrieval is easier here if the evaluation has more.
"""

import base64
import io
from dataclasses import dataclass
from itertools import islice

import torch

from infcl.config.redaction import redacted
from infcl.report.records import Run

QUERIES, TOP = 6, 5
MAX_CANDIDATES, MIN_CANDIDATES = 1024, 48
BUDGET_FLOPS = 2e12  # a few seconds on a few cores
_THUMBNAIL = 112  # pixels


@dataclass(frozen=True)
class Item:
    image: str  # data: uri
    text: str
    score: float  # cosine similarity with the query's partner or the candidate
    right: bool = False


@dataclass(frozen=True)
class Result:
    query: Item
    found: list[Item]  # best first
    rank: int  # rank of the query's partner, from 1


@dataclass(frozen=True)
class Gallery:
    text_to_image: list[Result]
    image_to_text: list[Result]
    candidates: int


def retrieval_gallery(run: Run) -> Gallery | str:
    """Return the gallery, or a sentence that says why there is none."""
    data = run.config.get("val_data")
    if not (run.root / "export" / "open_clip_model.safetensors").is_file():
        return "No gallery: the run has not exported a model yet."
    if not data:
        return "No gallery: the run had no --val-data."
    try:
        return _gallery(run, data)
    except (ValueError, FileNotFoundError):
        return f"No gallery: the --val-data {redacted(data)} is not there (a relative path is looked for from here)."


def _gallery(run: Run, data: str) -> Gallery | str:
    from infcl.checkpoint.run_folder import RunFolder
    from infcl.data.evaluation import EvalConfig, eval_source
    from infcl.evaluate.load import load_model
    from infcl.models.flops import forward_flops

    try:
        model, tokenize, _ = load_model(run.root / "export", device=torch.device("cpu"))
    except ValueError as error:
        return f"No gallery: {error}"
    flops = sum(forward_flops(model.cfg, training=False).values())
    limit = int(min(MAX_CANDIDATES, max(MIN_CANDIDATES, BUDGET_FLOPS // flops)))
    source = eval_source(EvalConfig.of(RunFolder(run.root).config(), data, model.cfg))
    captioned = ((sample.image, caption) for sample in source() if (caption := _caption(sample.captions)))
    samples = list(islice(captioned, limit))
    if len(samples) < 2:
        return f"No gallery: {redacted(data)} has no captioned pictures."
    pixels, captions = torch.stack([image for image, _ in samples]), [caption for _, caption in samples]
    with torch.no_grad():
        outputs = [model(pixels[i : i + 32], tokenize(captions[i : i + 32])) for i in range(0, len(pixels), 32)]
    images, texts = (torch.cat([output[f"{of}_features"] for output in outputs]) for of in ("image", "text"))
    scores = texts @ images.T  # [texts, images]
    count = min(QUERIES, len(images))
    queries = [int((k + 0.5) * len(images) / count) for k in range(count)]
    return Gallery(
        [_result(scores[q], q, captions, pixels) for q in queries],
        [_result(scores[:, q], q, captions, pixels) for q in queries],
        len(images),
    )


def _result(scores: torch.Tensor, query: int, captions: list[str], pixels: torch.Tensor) -> Result:
    """Return the best candidates of a query by its scores [N]. A candidate with the same caption counts as right."""

    def item(index: int) -> Item:
        right = captions[index] == captions[query]
        return Item(_thumbnail(pixels[index]), captions[index], float(scores[index]), right)

    best = scores.topk(min(TOP, len(scores))).indices.tolist()
    return Result(item(query), [item(index) for index in best], rank=1 + int((scores > scores[query]).sum()))


def _caption(captions: list[str]) -> str:
    return next((caption.strip() for caption in captions if caption.strip()), "")


def _thumbnail(pixels: torch.Tensor) -> str:
    """Return an image uint8 [3, S, S] as a data: URI."""
    from PIL import Image

    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
    kind = "PNG" if image.width <= 64 else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
