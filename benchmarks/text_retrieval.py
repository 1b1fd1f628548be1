"""Our loss for sentence-transformers compared with its CachedMultipleNegativesRankingLoss: seconds and memory per step.

    python -m benchmarks.text_retrieval --batches 4096 32768 131072 524288 --out result.jsonl

One GPU, a BERT-base made from its config with dropout, (anchor, positive) pairs of 32 tokens each, BF16 autocast,
AdamW. Both losses run in sentence-transformers' own gradient cache with the same mini-batches, so they differ in the
loss stage: its seconds and memory are reported on their own. Every case is a process, since one that runs out of memory
leaves nothing behind. Batches are tried in the given order, with both losses; --seconds bounds all of them together.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

TOKENS, GIB = 32, 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[4096, 32768, 131072, 524288])
    parser.add_argument("--losses", nargs="+", default=["infcl", "sentence-transformers"])
    parser.add_argument("--mini-batch-size", type=int, default=1024, help="rows encoded at once")
    parser.add_argument("--seconds", type=float, default=420.0, help="of all cases together")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers, for a trial on a CPU")
    parser.add_argument("--out", help="file of JSON lines, one per case")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # LOSS BATCH, in a process of its own
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case[0], int(args.case[1]), args.mini_batch_size, args.tiny)))
        return
    end = time.monotonic() + args.seconds
    for batch in args.batches:
        for loss in args.losses:
            row = {"loss": loss, "batch": batch} | run_case(loss, batch, args, end - time.monotonic())
            print(json.dumps(row), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(row) + "\n")


def run_case(loss: str, batch: int, args: argparse.Namespace, seconds: float) -> dict:
    """What a case measured, or how it ended."""
    if seconds <= 0:
        return {"error": "no time left"}
    command = [sys.executable, "-m", "benchmarks.text_retrieval", "--mini-batch-size", str(args.mini_batch_size)]
    command += ["--case", loss, str(batch), *(["--tiny"] if args.tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(name: str, batch: int, mini_batch_size: int, tiny: bool) -> dict:
    """Seconds and peak memory of one step after a warm-up of four mini-batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(tiny, device)
    loss = make_loss(name, model, mini_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    stage: dict[str, float] = {}
    calculate = loss.calculate_loss

    def watched(*args, **options):
        begun, before = now(device), peak(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            stage["held"] = torch.cuda.memory_allocated() / GIB
        value = calculate(*args, **options)
        stage["seconds"], stage["peak"] = now(device) - begun, peak(device)
        stage["before"] = before
        return value

    loss.calculate_loss = watched

    def step(columns: list[dict[str, torch.Tensor]]) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(columns, None)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value)

    step(draw(min(batch, 4 * mini_batch_size), device))
    columns = draw(batch, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = now(device)
    value = step(columns)
    seconds = now(device) - begun
    return {
        "value": round(value, 5),
        "seconds": round(seconds, 3),
        "samples_per_second": round(batch / seconds, 1),
        "peak_gib": round(max(stage["before"], stage["peak"], peak(device)), 2),
        "loss_seconds": round(stage["seconds"], 4),
        "loss_peak_gib": round(stage["peak"] - stage.get("held", 0.0), 3),
    }


def make_model(tiny: bool, device: torch.device):
    """A SentenceTransformer of a BERT-base with random weights and mean pooling."""
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
    """Anchors and positives of random tokens, none of them padding."""
    generator = torch.Generator(device).manual_seed(rows)
    shape = rows, TOKENS
    return [
        {
            "input_ids": torch.randint(1000, 30000, shape, generator=generator, device=device),
            "attention_mask": torch.ones(shape, dtype=torch.long, device=device),
        }
        for _ in range(2)
    ]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
