"""python -m infcl.data.tokenizer train: train a tokenizer on the captions of shards or tables."""

import os
from collections.abc import Sequence
from pathlib import Path

from infcl.config import OneLineParser, TrainConfig
from infcl.config.redaction import redact_output
from infcl.data.index import DEFAULT_KEYS
from infcl.data.loader import open_collection
from infcl.data.table import add_column_flags
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import captions_of, train_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    redact_output()
    parser = OneLineParser(prog="python -m infcl.data.tokenizer", description="Learn a tokenizer from shards.")
    parser.add_argument("command", choices=["train"])
    parser.add_argument("--train-data", required=True, help="tars, braces, a '::' list, a glob or a folder; tables")
    add_column_flags(parser)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--out", required=True, help="the model file to write")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="unigram")
    parser.add_argument("--byte-fallback", action="store_true", help="spell unknown characters in bytes")
    parser.add_argument("--max-captions", type=int, default=2_000_000, help="captions to learn from")
    parser.add_argument("--text-key", default=DEFAULT_KEYS.text, help="caption extensions, split by ';'")
    parser.add_argument("--json-text-key", help="captions from this key of the json member ('a;b': the first found)")
    args = parser.parse_args(arguments)
    folder = next(path for path in Path(args.out).absolute().parents if path.exists())
    # checked first: reading may take an hour
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(args.out).is_dir():
        parser.error(f"--out {args.out}: name a file in a folder that can be written to")
    try:
        of_data = {name: value for name, value in vars(args).items() if name.startswith(("csv_", "text_key", "json_"))}
        captions = captions_of(open_collection(TrainConfig(train_data=args.train_data, **of_data)), args.max_captions)
        train_tokenizer(captions, args.out, args.vocab_size, args.model_type, byte_fallback=args.byte_fallback)
    except ValueError as error:
        parser.error(str(error))
    tokenizer = Tokenizer(args.out)
    print(f"{args.out}: {tokenizer.vocab_size} pieces, sha256 {tokenizer.sha256[:16]}")


if __name__ == "__main__":
    main()
