"""python -m infcl.data.tokenizer train: train a tokenizer on the captions of shards or tables."""

import os
from collections.abc import Sequence
from pathlib import Path

from infcl.config import OneLineParser
from infcl.config.redaction import redact_output
from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.records import ShardReader
from infcl.data.shards import load_manifest
from infcl.data.table import TableReader, add_column_flags, columns_of
from infcl.data.tokenizer import Tokenizer
from infcl.data.tokenizer.learn import captions_of, train_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    redact_output()
    parser = OneLineParser(prog="python -m infcl.data.tokenizer", description="Learn a tokenizer from shards.")
    parser.add_argument("command", choices=["train"])
    parser.add_argument("--train-data", required=True, help="tars, braces, a '::' list, a glob or a folder; tables")
    parser.add_argument("--dataset-type", choices=["webdataset", "csv"], default="webdataset")
    add_column_flags(parser)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--out", required=True, help="the model file to write")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="unigram")
    parser.add_argument("--byte-fallback", action="store_true", help="spell unknown characters in bytes")
    parser.add_argument("--max-captions", type=int, default=2_000_000, help="captions to learn from")
    parser.add_argument("--text-key", default=DEFAULT_KEYS.text, help="caption extensions, split by ';'")
    parser.add_argument("--json-text-key", help="captions from this key of the json member ('a;b': the first found)")
    args = parser.parse_args(arguments)
    keys = SampleKeys(text=args.text_key, json_text=args.json_text_key)
    folder = next(path for path in Path(args.out).absolute().parents if path.exists())
    # checked first: reading may take an hour
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(args.out).is_dir():
        parser.error(f"--out {args.out}: name a file in a folder that can be written to")
    try:
        reader: TableReader | ShardReader
        if args.dataset_type == "csv":
            reader = TableReader(args.train_data, columns=columns_of(args))
        else:
            reader = ShardReader(load_manifest(args.train_data, keys=keys), keys)
        captions = captions_of(reader, args.max_captions)
        train_tokenizer(captions, args.out, args.vocab_size, args.model_type, byte_fallback=args.byte_fallback)
    except ValueError as error:
        parser.error(str(error))
    tokenizer = Tokenizer(args.out)
    print(f"{args.out}: {tokenizer.vocab_size} pieces, sha256 {tokenizer.sha256[:16]}")


if __name__ == "__main__":
    main()
