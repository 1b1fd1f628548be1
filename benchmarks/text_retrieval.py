"""Compare infcl's loss for sentence-transformers with CachedMultipleNegativesRankingLoss: seconds and memory per step.

    python -m benchmarks.text_retrieval infcl --batches 4096 32768 131072 524288 --out result.jsonl
    python -m benchmarks.text_retrieval sentence-transformers --documents 1048576 2097152 4194304 --out result.jsonl

Setup: one GPU, a BERT-base with random weights and dropout, (anchor, positive) pairs of 32 tokens each, AdamW. Both
losses run in sentence-transformers' own gradient cache with the same mini-batches, so they differ only in the loss
stage, which is also measured alone. BF16 is used in one of these ways:

    step       autocast around forward and backward: both encodings and the loss in BF16, the fastest for both losses
    forward    autocast around the forward, as in a training loop: the package's second encoding runs in the backward,
               in FP32

--documents measures only the loss stage: the anchors of one mini-batch against N documents on one GPU, the number that
each rank of the package's loss gathers. If a case runs out of memory, that is reported and the run ends.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

TOKENS, GIB = 32, 2**30
Measured = dict[str, float | str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loss", choices=["infcl", "sentence-transformers"])
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--documents", type=int, nargs="*", default=[])
    parser.add_argument("--autocast", nargs="+", default=["step"], choices=["step", "forward"])
    parser.add_argument("--mini-batch-size", type=int, default=2048, help="rows encoded at once")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers, for a trial on a CPU")
    parser.add_argument("--out", help="file of JSON lines, one per case")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases: list[tuple[str, str, int, Callable[..., Measured]]]
    cases = [("batch", autocast, rows, measure) for autocast in args.autocast for rows in args.batches]
    cases += [("documents", "step", rows, measure_documents) for rows in args.documents]
    for kind, autocast, rows, measured in cases:
        model = make_model(args.tiny, device)
        loss = make_loss(args.loss, model, args.mini_batch_size)
        row = {"loss": args.loss, "autocast": autocast, "mini_batch": args.mini_batch_size, kind: rows}
        try:
            row |= measured(loss, autocast, rows, device)
        except torch.OutOfMemoryError as error:
            row |= {"error": str(error)[:200]}
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
        if "error" in row:
            break


def measure(loss: Any, autocast: str, batch: int, device: torch.device) -> Measured:
    """Measure a step of `batch` pairs after a warm-up of four mini-batches, and its loss stage alone."""
    model, mini_batch = loss.model, loss.mini_batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step(columns: list[dict[str, Tensor]]) -> float:
        with bf16(device):
            value = loss(columns, None)
            if autocast == "step":
                value.backward()
        if autocast != "step":
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    step(draw(min(batch, 4 * mini_batch), device))
    stage = measure_stage(loss, (batch, batch), device)
    columns = draw(batch, device)
    value, seconds, peak = watch(lambda: step(columns), device)
    return {
        "value": round(value, 5),
        "seconds": round(seconds, 3),
        "samples_per_second": round(batch / seconds, 1),
        "peak_gib": round(peak, 2),
        "loss_seconds": stage["seconds"],
        "loss_peak_gib": stage["peak_gib"],
    }


def measure_documents(loss: Any, autocast: str, documents: int, device: torch.device) -> Measured:
    """Measure the loss stage alone, for the anchors of one mini-batch."""
    return measure_stage(loss, (loss.mini_batch_size, documents), device)


def measure_stage(loss: Any, rows: tuple[int, int], device: torch.device) -> Measured:
    """Measure seconds and peak memory of the loss and its gradients for random embeddings, after compilation."""
    width = loss.model[1].get_embedding_dimension()
    generator = torch.Generator(device).manual_seed(0)
    columns = [torch.randn(count, width, generator=generator, device=device) for count in rows]

    def stage() -> float:
        parts = [[part.requires_grad_() for part in column.split(loss.mini_batch_size)] for column in columns]
        with bf16(device):
            return float(loss.calculate_loss(parts, with_backward=True))

    stage()
    _, seconds, peak = watch(stage, device)
    return {"seconds": round(seconds, 4), "peak_gib": round(peak, 3)}


def watch(call: Callable[[], float], device: torch.device) -> tuple[float, float, float]:
    """Return (result, seconds, peak memory of the device in GiB) of a call."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begun = time.perf_counter()
    value = call()  # a float, so the device has finished
    if on_gpu:
        torch.cuda.synchronize()
    return value, time.perf_counter() - begun, torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0


def bf16(device: torch.device) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16)


def make_model(tiny: bool, device: torch.device):
    """Make a SentenceTransformer from a BERT-base with random weights and mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    class Bert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = BertModel(BertConfig(**sizes if tiny else {}), add_pooling_layer=False)

        def forward(self, given):
            tokens = self.bert(given["input_ids"], given["attention_mask"]).last_hidden_state
            return given | {"token_embeddings": tokens}

    torch.manual_seed(0)
    bert = Bert()
    pooling = Pooling(bert.bert.config.hidden_size)
    return SentenceTransformer(modules=[bert, pooling], device=str(device)).train()


def make_loss(name: str, model, mini_batch_size: int):
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from infcl.integrations.sentence_transformers import RingMultipleNegativesRankingLoss

    if name == "infcl":
        return RingMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size)
    return CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size, gather_across_devices=True)


def draw(rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Draw anchors and positives of random tokens, without padding."""
    generator = torch.Generator(device).manual_seed(rows)
    shape = rows, TOKENS
    return [
        {
            "input_ids": torch.randint(1000, 30000, shape, generator=generator, device=device),
            "attention_mask": torch.ones(shape, dtype=torch.long, device=device),
        }
        for _ in range(2)
    ]


if __name__ == "__main__":
    main()
