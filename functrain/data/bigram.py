"""The baseline: an interpolated bigram model, from counts alone.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1998, equation 20), the strongest of the common bigram models:

    p(w | v) = max(c(v, w) - D, 0) / c(v) + D * t(v) / c(v) * q(w)
    q(w)     = (1 - e) * n(w) / N + e / V

with c the counts in the training tokens, t(v) how many different words follow v, n(w) how many different words w follows, N their sum,
and V the vocabulary's size. D and e are chosen on the last tenth of the training tokens, with counts of the rest; then all of them are
counted. A word v that was never followed by anything leaves p(w | v) = q(w).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

CHUNK = 1 << 23  # pairs counted together
DISCOUNTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
UNIFORM = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Bigram:
    """A fitted bigram model."""

    codes: np.ndarray  # v * V + w of each pair that occurs, sorted, int64 [pairs]
    counts: np.ndarray  # how often it occurs, int64 [pairs]
    vocab_size: int  # V
    discount: float = 0.75  # D
    uniform: float = 1e-3  # e

    def nats(self, previous: np.ndarray, following: np.ndarray) -> float:
        """Mean cross-entropy of the following tokens given the ones before them, in nats a token.

        Args:
            previous: token ids [tokens].
            following: token ids [tokens].

        >>> bigram = count_pairs(np.array([0, 1, 0, 1, 0, 1]), 3)
        >>> bool(bigram.nats(np.array([0]), np.array([1])) < bigram.nats(np.array([0]), np.array([2])))
        True
        """
        return self.terms(previous, following).nats(self.discount, self.uniform)

    def terms(self, previous: np.ndarray, following: np.ndarray) -> "Terms":
        """What p(w | v) is made of, before D and e are chosen."""
        size = self.vocab_size
        v, w = previous.astype(np.int64), following.astype(np.int64)
        before, after = np.divmod(self.codes, size)
        return Terms(
            pair=self._count(v * size + w),
            total=np.bincount(before, self.counts, minlength=size)[v],
            followers=np.bincount(before, minlength=size)[v],
            continuation=np.bincount(after, minlength=size)[w] / max(len(self.codes), 1),
            vocab_size=size,
        )

    def _count(self, codes: np.ndarray) -> np.ndarray:
        """How often each of some pairs occurs."""
        if not len(self.codes):
            return np.zeros(len(codes), np.int64)
        place = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[place] == codes, self.counts[place], 0)


@dataclass(frozen=True)
class Terms:
    """What the probabilities of some tokens are made of, each [tokens]."""

    pair: np.ndarray  # c(v, w)
    total: np.ndarray  # c(v)
    followers: np.ndarray  # t(v)
    continuation: np.ndarray  # n(w) / N
    vocab_size: int  # V

    def nats(self, discount: float, uniform: float) -> float:
        """Mean of -log p(w | v) for one choice of D and e."""
        lower = (1 - uniform) * self.continuation + uniform / self.vocab_size
        seen = np.maximum(self.total, 1)
        rest = np.where(self.total > 0, discount * self.followers / seen, 1.0)
        return float(-np.log(np.maximum(self.pair - discount, 0) / seen + rest * lower).mean())


def fit_bigram(tokens: np.ndarray, vocab_size: int) -> Bigram:
    """Count pairs, and choose D and e on the last tenth.

    Args:
        tokens: training token ids [tokens]; a memory map is read in chunks.
        vocab_size: ids are below it.
    """
    cut = len(tokens) - min(max(len(tokens) // 10, 1), CHUNK)
    trial, held_out = count_pairs(tokens[:cut], vocab_size), np.asarray(tokens[cut - 1 if cut else 0 :])
    if len(held_out) < 2:
        return count_pairs(tokens, vocab_size)
    terms = trial.terms(held_out[:-1], held_out[1:])
    discount, uniform = min(product(DISCOUNTS, UNIFORM), key=lambda choice: terms.nats(*choice))
    whole = _merge([(trial.codes, trial.counts), _count_codes(held_out, vocab_size)])
    return Bigram(*whole, vocab_size, discount, uniform)


def count_pairs(tokens: np.ndarray, vocab_size: int) -> Bigram:
    """The bigram model of some tokens, with the usual D and e."""
    starts = range(0, max(len(tokens) - 1, 1), CHUNK)
    found: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    for start in starts:
        found = _merge([found, _count_codes(tokens[start : start + CHUNK + 1], vocab_size)])
    return Bigram(*found, vocab_size)


def _count_codes(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.asarray(tokens, np.int64)
    codes, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
    return codes, counts


def _merge(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    codes, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    merged, place = np.unique(codes, return_inverse=True)
    return merged, np.bincount(place, counts, minlength=len(merged)).astype(np.int64)
