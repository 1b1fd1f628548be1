"""Tokenizer training: learn a sentencepiece model file from captions of shards, tables or other sources."""

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from infcl.config.disk import write_atomic
from infcl.data.captions import decode_captions
from infcl.data.plan import EpochPlan
from infcl.data.records import BadSample, ShardReader
from infcl.data.table import TableReader
from infcl.data.tokenizer import EOS_ID, PAD_ID, UNK_ID, canonicalise, repair


def train_tokenizer(
    captions: Iterable[str],
    path: str | os.PathLike,
    vocab_size: int,
    model_type: str = "bpe",
    *,
    byte_fallback: bool = False,
    num_threads: int = 4,
) -> None:
    """Learn a sentencepiece model from captions and write it to `path` atomically.

    The same captions, options and `num_threads` give the same file. With "unigram", the file may depend on the number
    of threads.

    Args:
        model_type: "bpe" or "unigram".
        byte_fallback: encode unknown characters as bytes (256 more ids) instead of unk; useful for many languages.

    Raises:
        ValueError: the captions do not allow this `vocab_size`, or `path` cannot be written.
    """
    import sentencepiece

    if model_type not in ("bpe", "unigram"):
        raise ValueError(f"model_type is 'bpe' or 'unigram', not {model_type!r}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text for text in map(canonicalise, map(repair, captions)) if text),
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
        why = str(error).rpartition("] ")[2] or "there are none (--text-key, --json-text-key)"
        raise ValueError(f"no tokenizer of {vocab_size} pieces from these captions: {why}") from error
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), model.getvalue())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def captions_of(reader: ShardReader | TableReader, limit: int) -> Iterator[str]:
    """Yield up to `limit` captions in a fixed random order of the data, without reading images."""
    plan, total = EpochPlan(reader.counts, chunk=64, seed=0, epoch=0), min(limit, int(reader.counts.sum()))
    for start in range(0, total, 1024):
        for record in reader.read(plan.samples(start, min(start + 1024, total)), images=False):
            try:
                yield decode_captions(record, reader.keys)[0][0]
            except BadSample:
                continue  # training counts and reports bad samples
