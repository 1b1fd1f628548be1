"""Captions -> token ids, by sentencepiece.

In:  list of str.
Out: int64 [n, L]: ids, one eos, then padding; a caption that is too long is cut so that eos stays last.
Ids: pad 0, eos 1, unk 2, no bos (the layout of T5 and SigLIP). The text tower is causal and pools at the first eos, so
     what follows it is inert.

Captions are canonicalised before training and before encoding, as SigLIP does: '_' becomes a space, ASCII punctuation
is removed, letters are lowered, white space is collapsed.

`python -m infcl.data.tokenizer train --train-data URLS --vocab-size N --out FILE` learns a model from shards or tables.
"""

import argparse
import contextlib
import hashlib
import io
import os
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infcl.data.index import DEFAULT_KEYS, SampleKeys

if TYPE_CHECKING:
    from infcl.data.records import ShardReader
    from infcl.data.table import TableReader

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_REMOVE_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


def canonicalise(caption: str) -> str:
    """'A_photo of  a Dog!' -> 'a photo of a dog'."""
    text = caption.encode("utf-8", "replace").decode()  # sentencepiece raises on a lone surrogate
    return " ".join(text.translate(_REMOVE_PUNCTUATION).lower().split())


def train_tokenizer(
    captions: Iterable[str],
    path: str | os.PathLike,
    vocab_size: int,
    model_type: str = "bpe",
    *,
    byte_fallback: bool = False,
    num_threads: int = 4,
) -> None:
    """Learn a sentencepiece model from captions and write it to `path` (atomically).

    The same captions, options and `num_threads` give the same file; for "unigram" another number of threads may not.
    `byte_fallback` spells unknown characters in bytes (256 more ids) instead of one unk: for many languages.
    Raises ValueError if the captions cannot fill `vocab_size`, with the largest possible size, or if `path` cannot be
    written.
    """
    import sentencepiece

    if model_type not in ("bpe", "unigram"):
        raise ValueError(f"model_type is 'bpe' or 'unigram', not {model_type!r}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text for text in map(canonicalise, captions) if text),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=byte_fallback,
            num_threads=num_threads,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        why = _reason(error, model_type)
        raise ValueError(f"no tokenizer of {vocab_size} pieces from these captions: {why}") from error
    _write(Path(path), model.getvalue())


def _reason(error: RuntimeError, model_type: str) -> str:
    """sentencepiece's message in the words of the flags: of the vocabulary's size, or that there is no caption."""
    if most := re.search(r"Please set it to a value <= (\d+)", str(error)):
        more = "" if model_type == "bpe" else ", or --model-type bpe, which makes more of few"
        return f"they give at most {most[1]} (--vocab-size {most[1]}, or more captions{more})"
    if "sentences_.empty()" in str(error):
        return "there is none among them (--text-key, --json-text-key; --dataset-type csv for tables)"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return f"their characters alone are {least[1]} (--vocab-size above that)"
    return str(error)


def _write(path: Path, content: bytes) -> None:
    """Atomically; ValueError, with nothing left behind, when the disk does not take it."""
    temporary = Path(f"{path}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Tokenizer:
    """A sentencepiece model with a context length. Pickles as its bytes, so workers need no file.

    Attributes: vocab_size, context_length, pad_id, eos_id, sha256 (of the model file), truncated (captions cut so far
    by this instance). Raises ValueError if the file is no such model.
    """

    def __init__(self, model_path: str | os.PathLike, context_length: int = 64):
        try:
            self._load(Path(model_path).read_bytes(), context_length)
        except (OSError, RuntimeError) as error:  # RuntimeError: sentencepiece's, of a file that it did not write
            why = error.strerror if isinstance(error, OSError) else "it cannot be parsed"
            raise ValueError(f"tokenizer {model_path} is no sentencepiece model ({why})") from error

    def _load(self, model: bytes, context_length: int) -> None:
        import sentencepiece

        if context_length < 2:
            raise ValueError(f"context length {context_length} leaves no room for a token and eos")
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.context_length = context_length
        self.vocab_size = self._processor.vocab_size()
        self.pad_id, self.eos_id = self._processor.pad_id(), self._processor.eos_id()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.truncated = 0
        if (self.pad_id, self.eos_id) != (PAD_ID, EOS_ID):
            raise ValueError(
                f"the tokenizer has pad id {self.pad_id} and eos id {self.eos_id}, not {PAD_ID} and {EOS_ID}: "
                f"train one with `python -m infcl.data.tokenizer train`"
            )

    def __getstate__(self) -> tuple[bytes, int]:
        return self._model, self.context_length

    def __setstate__(self, state: tuple[bytes, int]) -> None:
        self._load(*state)

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """n captions -> int64 [n, context_length]."""
        ids = self._processor.encode([canonicalise(caption) for caption in captions], num_threads=1)
        tokens = torch.full((len(ids), self.context_length), self.pad_id, dtype=torch.int64)
        room = self.context_length - 1
        for i, row in enumerate(ids):
            self.truncated += len(row) > room
            row = row[:room] + [self.eos_id]
            tokens[i, : len(row)] = torch.tensor(row)
        return tokens

    def save(self, path: str | os.PathLike) -> None:
        """Write the model file, byte for byte."""
        Path(path).write_bytes(self._model)


def shard_captions(urls: str | Sequence[str], limit: int, *, keys: SampleKeys = DEFAULT_KEYS) -> Iterator[str]:
    """Up to `limit` captions from all over the shards, the same each time, without reading an image."""
    from infcl.data.records import ShardReader
    from infcl.data.shards import load_manifest

    manifest = load_manifest(urls, keys=keys)
    return _captions(ShardReader(manifest, keys), [shard.samples for shard in manifest.shards], limit)


def table_captions(table: "TableReader", limit: int) -> Iterator[str]:
    """The same of tables."""
    return _captions(table, table.counts.tolist(), limit)


def _captions(reader: "ShardReader | TableReader", sizes: list[int], limit: int) -> Iterator[str]:
    from infcl.data.plan import EpochPlan
    from infcl.data.samples import BadSample, decode_caption

    plan, total = EpochPlan(sizes, chunk=64, seed=0, epoch=0), min(limit, sum(sizes))
    for start in range(0, total, 1024):
        for record in reader.read(plan.samples(start, min(start + 1024, total)), images=False):
            try:
                yield decode_caption(record, reader.keys)[0]
            except BadSample:
                continue  # training counts and reports it


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infcl.data.tokenizer", description="Learn a tokenizer from shards."
    )
    parser.add_argument("command", choices=["train"])
    parser.add_argument("--train-data", required=True, help="tars, braces, a '::' list, a glob or a folder; tables")
    parser.add_argument("--dataset-type", choices=["webdataset", "csv"], default="webdataset")
    parser.add_argument("--csv-separator", default="\t")
    parser.add_argument("--csv-img-key", default="filepath")
    parser.add_argument("--csv-caption-key", default="title")
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
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(args.out).is_dir():  # before an hour's reading
        parser.error(f"--out {args.out}: name a file in a folder that can be written to")
    try:
        if args.dataset_type == "csv":
            from infcl.data.table import TableReader

            columns = {"image_column": args.csv_img_key, "caption_column": args.csv_caption_key}
            table = TableReader(args.train_data, separator=args.csv_separator, **columns)
            captions = table_captions(table, args.max_captions)
        else:
            captions = shard_captions(args.train_data, args.max_captions, keys=keys)
        train_tokenizer(captions, args.out, args.vocab_size, args.model_type, byte_fallback=args.byte_fallback)
    except ValueError as error:
        parser.error(str(error))
    tokenizer = Tokenizer(args.out)
    print(f"{args.out}: {tokenizer.vocab_size} pieces, sha256 {tokenizer.sha256[:16]}")


if __name__ == "__main__":
    main()
