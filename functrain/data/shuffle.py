"""A permutation of any size that needs no memory: the place of one element is computed when it is asked for.

A keyed Feistel network permutes the numbers below a power of four; places outside the range are sent through it again until they fall
inside (cycle walking; Black and Rogaway 2002). Fewer than four passes are needed on average.
"""

import numpy as np

ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def permuted(places: np.ndarray, size: int, key: tuple[int, int]) -> np.ndarray:
    """Where a random permutation of `range(size)` sends some of its elements.

    Args:
        places: integers in [0, size), any shape.
        size: number of elements, at most 2 ** 62.
        key: two integers, such as a seed and an epoch; another key is another permutation.

    Returns:
        int64, the shape of `places`.

    >>> sorted(permuted(np.arange(5), 5, (0, 0)).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    round_keys = mix(mix(np.uint64(key[0] & int(_MASK))) ^ np.uint64(key[1] & int(_MASK))) ^ np.arange(1, ROUNDS + 1, dtype=np.uint64)
    values = _feistel(np.asarray(places).astype(np.uint64), half, round_keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, round_keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low
    for round_key in round_keys:
        left, right = right, left ^ (mix(right ^ mix(round_key)) & low)
    return (left << half) | right


def mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """Spread the bits of 64-bit words: splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    words = np.atleast_1d(x) + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
