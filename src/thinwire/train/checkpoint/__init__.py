"""Checkpoints: checkpointer -> state -> storage -> manifest, and back.

checkpointer  when what is written, committed by a rename, examined, loaded
state         a run at a step boundary as tensors and numbers; optimizer_state, generators: parts of it
storage       tensors of all ranks to safetensors files; saved: what was read, and the words for what differs
ranks         who writes and reads together, and what is said of one that is lost
manifest      what a checkpoint directory is, with the size and checksum of every file
export        a checkpoint as a Hugging Face directory
"""
