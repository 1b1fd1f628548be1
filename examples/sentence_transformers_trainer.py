"""Train a sentence-transformers model with the ring loss, in its own trainer.

    torchrun --nproc-per-node 8 examples/sentence_transformers_trainer.py --model microsoft/mpnet-base \
        --data pairs.jsonl --batch-size 16384

In: JSON lines with the columns anchor, positive and any number of negatives (negative_1, ...). It needs
`pip install "infcl[sentence-transformers]"`.
"""

import argparse

import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from infcl.integrations.sentence_transformers import RingMultipleNegativesRankingLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--batch-size", type=int, default=16384, help="rows per GPU and step")
    parser.add_argument("--mini-batch-size", type=int, default=256, help="rows encoded at once")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--output", default="model")
    args = parser.parse_args()

    model = SentenceTransformer(args.model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            args.output,
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=args.epochs,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            dataloader_drop_last=True,  # all ranks have as many rows
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        loss=RingMultipleNegativesRankingLoss(model, mini_batch_size=args.mini_batch_size),
    )
    trainer.train()
    model.save_pretrained(args.output)


if __name__ == "__main__":
    main()
