"""SHARD -> SAMPLE -> BATCH. Reading order:

storage.py, spool.py, remote.py   a shard, wherever it is stored -> bytes at (offset, size)
tar.py, index.py   one tar -> its members -> where its samples lie
shards.py      urls -> manifest of indexed shards; sizes.py: how many samples, from the files beside them
records.py     sample numbers -> undecoded members; table.py: the same for rows of a csv table
plan.py        (seed, epoch) -> the order of all samples; which of them a rank reads in a step
images.py, captions.py   bytes -> pixels, texts, or the cause why not; samples.py: of a sample, of a micro-batch
transforms.py, colour.py   image -> the tower's pixels, augmented
tokenizer/, open_clip_tokenizer.py   captions -> token ids
config.py      DataConfig: what the flags say of all this
indexed.py, streaming.py, workers.py   two readers of micro-batches, over torch's DataLoader
loader.py, synthetic.py   TrainLoader and SyntheticLoader: what the training loop iterates over
evaluation.py  EvalShards: what the evaluations iterate over
render.py, demo.py   the embedded data set

docs/howto/data.md is the user's page.
"""
