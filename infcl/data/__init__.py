"""SHARD -> SAMPLE -> BATCH. Reading order:

config.py      what the flags say of a sample
storage.py     a shard on any storage -> bytes at (offset, size)
tar.py, index.py   one tar -> its members -> the offsets of its samples
shards.py      urls -> manifest of indexed shards
records.py     sample numbers -> undecoded members; table.py does the same for rows of a csv table
plan.py        (seed, epoch) -> the order of all samples, and the samples that a rank reads per step
images.py, captions.py   bytes -> pixels and texts, or the cause of the failure
transforms.py  image -> augmented pixels for the image tower
tokenizer/     captions -> token ids: our own sentencepiece model, or a tokenizer of open_clip or Hugging Face
samples.py     records -> samples -> a micro-batch
indexed.py, streaming.py, workers.py   two readers of micro-batches, on torch's DataLoader
loader.py, synthetic.py   StepLoader, over which the training loop iterates; TrainLoader, SyntheticSource
evaluation.py  the data sets of the evaluations
demo.py        the built-in demo data set

docs/howto/data.md is the user documentation.
"""
