"""Which sample comes at which position of a run: a pure function of (seed, position).

Position p lies in epoch p // n, and each epoch is a fresh permutation of the n samples, so all there is to
save is one number. The permutation is a Feistel network over a grid of a x b >= n cells, index = l b + r:
every round adds to one coordinate, modulo its size, a hash of the other, which can be undone and so is a
bijection; an index that lands outside [0, n) is sent through again (cycle walking) until it is inside.
No memory, and the same order on every machine and with every release of torch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


class GlobalSampler:
    """The order of samples, for all ranks together.

    On W ranks with micro-batches of m, rank r takes `take(p + r * m, m)` and all move on by W m. So which
    samples are in a global batch does not depend on the number of ranks or on accumulation.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"a sampler needs at least one sample, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)

    def take(self, position: int, count: int) -> list[int]:
        """The sample ids at positions [position, position + count)."""
        if position < 0 or count < 0:
            raise ValueError(f"positions start at 0, got position {position} and count {count}")
        positions = np.arange(position, position + count, dtype=np.uint64)
        epochs, indices = np.divmod(positions, np.uint64(self.num_samples))
        keys = _mix(epochs ^ _mix(np.array([self.seed % 2**64], np.uint64)))
        samples = self._permute(indices, keys)
        while (outside := samples >= self.num_samples).any():
            samples[outside] = self._permute(samples[outside], keys[outside])
        ids: list[int] = samples.tolist()
        return ids

    def _permute(self, index: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through the network: a bijection of the grid's cells for each key."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = index // columns, index % columns
        for step in range(_ROUNDS):
            left = (left + _mix((key + np.uint64(2 * step)) ^ _mix(right)) % rows) % rows
            right = (right + _mix((key + np.uint64(2 * step + 1)) ^ _mix(left)) % columns) % columns
        return left * columns + right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbours."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
