"""Train a text retriever from any Hugging Face encoder, with hard negatives, over all GPUs.

    torchrun --nproc-per-node 8 examples/text_retriever.py --model BAAI/bge-base-en-v1.5 --data pairs.jsonl

In: lines of {"query": ..., "positive": ..., "negatives": [...]}, all with as many negatives, or none. Every query
competes over the documents of all GPUs; a document whose text equals the query's positive is no negative of it. The
activations of one micro-batch are in memory. Out: --output in Hugging Face's format. wordnet.py has a data set for it.
"""

import argparse
import hashlib
import json
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel, AutoTokenizer

from infcl import Encoders, RingOptions, contrastive_step, info_nce_loss, split_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of an encoder with its tokenizer")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--batch-size", type=int, default=8192, help="queries per GPU and step")
    parser.add_argument("--micro-batch-size", type=int, default=256, help="queries encoded at once, with documents")
    parser.add_argument("--max-length", type=int, default=256, help="tokens")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--scale", type=float, default=50.0, help="1 / temperature")
    parser.add_argument("--output", default="retriever")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoder = AutoModel.from_pretrained(args.model, dtype=torch.float32)  # not the dtype of the file
    model = Encoders(encoder, features=mean_of_tokens, logit_scale=None).to(device)
    model = DistributedDataParallel(model, find_unused_parameters=True)  # a pooler that the mean does not use
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def loss(queries: torch.Tensor, *documents: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        own = torch.arange(len(queries), device=device)  # the first column of documents holds the positives
        options = {"document_ids": ids, "duplicates": "mask", "group": group, "options": RingOptions(tile_dtype="bf16")}
        return info_nce_loss(queries, torch.cat(documents), own, args.scale, **options)

    def tokens(texts: list[str]) -> dict[str, torch.Tensor]:
        given = tokenizer(texts, padding=True, truncation=True, max_length=args.max_length, return_tensors="pt")
        return dict(given.to(device))

    with open(args.data) as file:
        rows = [json.loads(line) for line in file]
    step = 0
    for epoch in range(args.epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist()[rank::world_size]
        for begin in range(0, len(rows) // world_size - args.batch_size + 1, args.batch_size):
            batch = [rows[index] for index in order[begin : begin + args.batch_size]]
            columns = list(zip(*([row["query"], row["positive"], *row["negatives"]] for row in batch)))
            ids = torch.tensor([text_id(text) for column in columns[1:] for text in column], device=device)
            micro_batches = split_batch(tuple(tokens(list(column)) for column in columns), args.micro_batch_size)
            with torch.autocast(device.type, torch.bfloat16):
                value = contrastive_step(model, micro_batches, partial(loss, ids=ids))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            dist.all_reduce(value)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {float(value) / world_size:.4f}", flush=True)
    if rank == 0:
        encoder.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    dist.destroy_process_group()


def text_id(text: str) -> int:
    """Return an int64 that is the same for equal texts on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def mean_of_tokens(output, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[rows, D]: the mean of the last layer over the tokens that are not padding."""
    mask = given["attention_mask"].unsqueeze(-1).to(output.last_hidden_state.dtype)
    return (output.last_hidden_state * mask).sum(1) / mask.sum(1)


if __name__ == "__main__":
    main()
