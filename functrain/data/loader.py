"""Batches as a pure function of (seed, position): what batch 1,000 holds does not depend on the batches before it having been read."""

import dataclasses
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from functrain.data.errors import DataError
from functrain.data.shuffle import mix, permuted

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loader:
    """Shuffled rows of a long sequence of tokens, without end.

    Each epoch cuts the tokens into rows at another offset and shows every row once, in another order. Rows go to batches one after another,
    so a batch may hold the end of one epoch and the start of the next. Ranks take neighbouring parts of each batch.

    >>> loader = Loader(np.arange(100), seq=8, batch=4, seed=0)
    >>> batch = loader.batch_at(1000)
    >>> batch["tokens"].shape, bool((batch["targets"] == batch["tokens"] + 1).all())
    (torch.Size([4, 8]), True)
    """

    tokens: np.ndarray  # token ids [tokens]
    seq: int  # tokens in a row
    batch: int  # rows in a batch, of all ranks together
    seed: int = 0
    rank: int = 0
    world: int = 1  # ranks

    def __post_init__(self) -> None:
        if min(self.seq, self.batch, self.world) < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"seq={self.seq}, batch={self.batch}, world={self.world} are positive, and 0 <= rank={self.rank} < world")
        if self.batch % self.world:
            raise ValueError(f"a batch of {self.batch} rows cannot be divided among {self.world} ranks")
        if len(self.tokens) < self.seq + 1:
            raise DataError(f"a sequence of {self.seq} tokens needs {self.seq + 1} training tokens, and there are {len(self.tokens)}")

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        return max(1, (len(self.tokens) - self.seq) // self.seq)

    def batch_at(self, position: int) -> Batch:
        """The rows of one batch that are this rank's.

        Args:
            position: number of the batch, from 0.

        Returns:
            `tokens` and `targets`, int64 [batch / world, seq]; a target is the token that follows.
        """
        share = self.batch // self.world
        first = position * self.batch + self.rank * share
        pieces = [self.tokens[start : start + self.seq + 1] for start in self.starts(np.arange(first, first + share))]
        rows = torch.from_numpy(np.stack(pieces).astype(np.int64))
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """The first token of some rows, counted from the first row of the first epoch; int64, like `numbers`."""
        epochs, places = np.divmod(numbers, self.rows)
        starts = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = permuted(places[here], self.rows, (self.seed, int(epoch))) * self.seq + self.offset(int(epoch))
        return starts

    def offset(self, epoch: int) -> int:
        """Where an epoch's first row starts, at most `seq - 1`."""
        room = min(self.seq, len(self.tokens) - self.rows * self.seq)
        return int(mix(mix(np.uint64(self.seed)) ^ np.uint64(epoch) ^ np.uint64(1 << 63))[0] % np.uint64(room))


@dataclass(frozen=True)
class Validation:
    """Neighbouring rows of held-out tokens, each token predicted once: the same for every model that is compared.

    >>> rows = Validation(np.arange(100), seq=8, batch=4)
    >>> rows.predicted, len(list(rows.batches())), rows.spread(24).rows
    (96, 3, array([0, 4, 8]))
    """

    tokens: np.ndarray  # token ids [tokens]
    seq: int  # tokens in a row; fewer than `seq + 1` tokens make one shorter row
    batch: int  # rows in a batch
    chosen: np.ndarray | None = None  # numbers of the rows; None for all

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise DataError(f"the held-out part has {len(self.tokens)} tokens, and predicting takes two; give a longer corpus")
        object.__setattr__(self, "seq", min(self.seq, len(self.tokens) - 1))

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows that are predicted."""
        return np.arange((len(self.tokens) - 1) // self.seq) if self.chosen is None else self.chosen

    @property
    def predicted(self) -> int:
        """How many tokens are predicted."""
        return len(self.rows) * self.seq

    def spread(self, tokens: int) -> "Validation":
        """About this many of the tokens, in rows that are spread evenly: for a quicker look."""
        count = min(len(self.rows), max(1, tokens // self.seq))
        return dataclasses.replace(self, chosen=self.rows[np.arange(count) * len(self.rows) // count])

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Every predicted token and the one before it, as (previous, following), each int64 [predicted]."""
        rows = self._cut(self.rows)
        return rows[:, :-1].ravel(), rows[:, 1:].ravel()

    def batches(self) -> Iterator[Batch]:
        """As the loader's; the last one is filled up with rows whose targets are -100, to be ignored."""
        for first in range(0, len(self.rows), self.batch):
            rows = self._cut(self.rows[first : first + self.batch])
            inputs, targets = np.zeros((self.batch, self.seq), np.int64), np.full((self.batch, self.seq), -100)
            inputs[: len(rows)], targets[: len(rows)] = rows[:, :-1], rows[:, 1:]
            yield {"tokens": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def _cut(self, rows: np.ndarray) -> np.ndarray:
        """Some rows with the token that follows each; int64 [rows, seq + 1]."""
        return np.stack([self.tokens[row * self.seq : (row + 1) * self.seq + 1] for row in rows]).astype(np.int64)


class Prefetch:
    """Batches read ahead in a thread: `for position, batch in prefetch`. As a context it stops the thread on leaving.

    An error in the thread is raised where its batch was due.

    >>> with Prefetch(Loader(np.arange(100), seq=8, batch=4), start=3, stop=5) as batches:
    ...     [position for position, _ in batches]
    [3, 4]
    """

    def __init__(self, loader: Loader, start: int = 0, stop: int | None = None, depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[int, Batch | BaseException] | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(loader, start, stop), name="functrain-loader", daemon=True)

    @property
    def ready(self) -> int:
        """How many batches are read and not taken yet."""
        return self._queue.qsize()

    def _read(self, loader: Loader, start: int, stop: int | None) -> None:
        position = start
        while not self._closed.is_set() and (stop is None or position < stop):
            try:
                item: Batch | BaseException = loader.batch_at(position)
            except BaseException as error:
                self._put((position, error))
                return
            self._put((position, item))
            position += 1
        self._put(None)

    def _put(self, item: tuple[int, Batch | BaseException] | None) -> None:
        """Wait for room in the queue, but not after closing."""
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def __enter__(self) -> "Prefetch":
        self._thread.start()
        return self

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        while (item := self._queue.get()) is not None:
            position, batch = item
            if isinstance(batch, BaseException):
                raise batch
            yield position, batch

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
