"""From text to batches: text -> tokenizers -> store or shards -> samples.

samples   batches addressed by sample id; sampler: their order, the same on every world size
text      files, globs, JSONL, parquet, data sets and the standard library as documents; held-out split
store     the tokens of a split in memory; shards: in memory-mapped files; tokenize: the command that writes them
"""
