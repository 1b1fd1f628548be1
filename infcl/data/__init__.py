"""SHARD -> SAMPLE -> BATCH. Reading order:

config.py      DataConfig: what the flags say about all of this
storage.py, spool.py, remote.py   a shard, wherever it is stored -> bytes at (offset, size)
tar.py, index.py   one tar -> its members -> where its samples are
shards.py      urls -> manifest of indexed shards
records.py     sample numbers -> undecoded members; table.py: the same for rows of a csv table
plan.py        (seed, epoch) -> the order of all samples, and which of them a rank reads in a step
images.py, captions.py   bytes -> pixels, texts, or the cause why not
transforms.py  image -> the tower's pixels, augmented
tokenizer/     captions -> token ids: our own sentencepiece model, or a tokenizer of open_clip or Hugging Face
samples.py     records -> samples -> a micro-batch
indexed.py, streaming.py, workers.py   two readers of micro-batches, over torch's DataLoader
loader.py, synthetic.py   TrainLoader and SyntheticLoader: what the training loop iterates over
evaluation.py  what the evaluations iterate over
render.py, demo.py   the embedded data set

docs/howto/data.md is the user's page.
"""
