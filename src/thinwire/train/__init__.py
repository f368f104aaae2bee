"""The trainer. Needs `thinwire[train]`.

command      arguments -> config -> launch (or torchrun) -> worker -> exit code; output: the run's directory
launch       the workers of one machine; local: how torch starts them; stragglers: the end of those that go on
loop         the training loop; run: its parts put together; progress, metrics: what it counts and tells
files        written whole or not at all
model        Hugging Face models; optimizer: AdamW, Muon and the learning rate
data/        text and tokenizers to batches of samples, and their order
checkpoint/  the state of a run to files and back; export to a Hugging Face directory
"""
