"""Settings of the whole suite, before anything imports torch or transformers."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
