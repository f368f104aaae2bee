"""The trainer. Needs `thinwire[train]`.

command      arguments -> config -> launch (or torchrun) -> worker -> exit code; output: the run's directory
loop         the training loop; run: its parts put together; progress, metrics: what it counts and tells
data         text -> tokenizers -> store or shards -> samples; sampler: their order; tokenize: the command
model        Hugging Face models; optimizer: AdamW, Muon and the learning rate
checkpoint   state (model, optimizer_state, generators, link) -> storage -> manifest; saved: reading it back
export       a checkpoint as a Hugging Face directory
"""
