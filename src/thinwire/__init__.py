"""Communication-efficient distributed training for PyTorch."""

from thinwire import recipes
from thinwire.collectives import CollectiveError
from thinwire.data_parallel import Link, attach
from thinwire.reducers import After, Dense, Local, Quantized, Routed

__all__ = ["After", "CollectiveError", "Dense", "Link", "Local", "Quantized", "Routed", "attach", "recipes"]
