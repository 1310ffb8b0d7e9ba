"""The loader is a pure function of (seed, position); the shuffle is a permutation; the bigram baseline is a distribution."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functrain.data.bigram import Bigram, count_pairs, fit_bigram
from functrain.data.errors import DataError
from functrain.data.loader import Loader, Prefetch, Validation
from functrain.data.shuffle import permuted
from tests.helpers import assert_trees_equal

TOKENS = np.arange(1000, dtype=np.uint16)


# ---- shuffle


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(-5, 2**40), st.integers(0, 2**40)))
def test_the_shuffle_is_a_permutation(size: int, key: tuple[int, int]) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_one_place_of_a_huge_permutation_needs_no_memory() -> None:
    size = 10**12
    found = permuted(np.arange(1000), size, (0, 0))
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < size / 100 < size * 0.99 < found.max() < size


def test_keys_give_every_order_equally_often() -> None:
    found = np.array([permuted(np.arange(4), 4, (seed, 3)) @ [64, 16, 4, 1] for seed in range(4800)])
    _, counts = np.unique(found, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 49.7  # chi-squared with 23 degrees of freedom: one key in a thousand lies above


# ---- loader


def test_a_target_is_the_token_that_follows() -> None:
    batch = Loader(TOKENS, seq=16, batch=4, seed=1).batch_at(7)
    assert batch["tokens"].shape == batch["targets"].shape == (4, 16)
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].is_contiguous()
    assert torch.equal(batch["targets"], batch["tokens"] + 1)


def test_a_batch_depends_on_seed_and_position_alone() -> None:
    loader = Loader(TOKENS, seq=16, batch=4, seed=1)
    for position in (0, 3, 500):
        assert_trees_equal(Loader(TOKENS, seq=16, batch=4, seed=1).batch_at(position), loader.batch_at(position))
    assert not torch.equal(loader.batch_at(0)["tokens"], Loader(TOKENS, seq=16, batch=4, seed=2).batch_at(0)["tokens"])


def test_a_resumed_run_reads_what_an_unbroken_one_reads() -> None:
    loader = Loader(TOKENS, seq=16, batch=4, seed=1)
    with Prefetch(loader, stop=9) as whole, Prefetch(loader, start=5, stop=9) as rest:
        assert_trees_equal([batch for _, batch in rest], [batch for position, batch in whole if position >= 5])


@given(length=st.integers(9, 400), seq=st.integers(1, 8), batch=st.integers(1, 7), seed=st.integers(0, 99))
def test_every_epoch_shows_each_row_once(length: int, seq: int, batch: int, seed: int) -> None:
    loader = Loader(np.arange(length), seq, batch, seed)
    starts = loader.starts(np.arange(3 * loader.rows)).reshape(3, -1)
    for epoch, row_starts in enumerate(starts):
        assert sorted(row_starts.tolist()) == [loader.offset(epoch) + i * seq for i in range(loader.rows)]
    assert starts.max() + seq + 1 <= length


def test_epochs_differ_in_order_and_offset() -> None:
    loader = Loader(TOKENS, seq=16, batch=4)
    assert len({loader.offset(epoch) for epoch in range(20)}) > 8
    first, second = loader.starts(np.arange(2 * loader.rows)).reshape(2, -1)
    assert not np.array_equal(first - loader.offset(0), second - loader.offset(1))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_divide_each_batch(world: int) -> None:
    whole = Loader(TOKENS, seq=16, batch=8, seed=3)
    for position in (0, 6, 7):
        parts = [Loader(TOKENS, 16, 8, seed=3, rank=rank, world=world).batch_at(position)["tokens"] for rank in range(world)]
        assert_trees_equal(torch.cat(parts), whole.batch_at(position)["tokens"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seq": 1000}, DataError, "a sequence of 1000 tokens needs 1001 training tokens, and there are 1000"),
        ({"world": 3}, ValueError, "8 rows cannot be divided among 3 ranks"),
        ({"rank": 2, "world": 2}, ValueError, "rank=2 < world"),
        ({"batch": 0}, ValueError, "batch=0"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Loader(**{"tokens": TOKENS, "seq": 16, "batch": 8, **changes})  # type: ignore[arg-type]


def test_the_shortest_corpus_is_one_row() -> None:
    assert Loader(np.arange(17), seq=16, batch=1).batch_at(3)["tokens"].tolist() == [list(range(16))]


# ---- prefetch


class Failing(Loader):
    def batch_at(self, position: int) -> dict[str, torch.Tensor]:
        if position == 2:
            raise OSError("the disk is gone")
        return super().batch_at(position)


def loader_threads() -> int:
    return sum(thread.name == "functrain-loader" for thread in threading.enumerate())


def test_an_error_while_reading_ahead_is_raised_where_its_batch_was_due() -> None:
    seen = []
    with pytest.raises(OSError, match="the disk is gone"), Prefetch(Failing(TOKENS, 16, 4)) as batches:  # noqa: PT012
        for position, _ in batches:
            seen.append(position)
    assert seen == [0, 1]
    assert loader_threads() == 0


def test_leaving_early_stops_the_thread() -> None:
    with Prefetch(Loader(TOKENS, 16, 4)) as batches:
        assert next(iter(batches))[0] == 0
        assert loader_threads() == 1
    assert loader_threads() == 0


def test_batches_are_read_ahead() -> None:
    with Prefetch(Loader(TOKENS, 16, 4), depth=3) as batches:
        deadline = time.monotonic() + 10
        while batches.ready < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batches.ready == 3


# ---- validation rows


@given(length=st.integers(2, 200), seq=st.integers(1, 20), batch=st.integers(1, 6))
def test_validation_predicts_each_token_once(length: int, seq: int, batch: int) -> None:
    rows = Validation(np.arange(length), seq, batch)
    batches = list(rows.batches())
    targets = torch.cat([b["targets"] for b in batches]).flatten()
    inputs = torch.cat([b["tokens"] for b in batches]).flatten()
    kept = targets >= 0
    assert targets[kept].tolist() == list(range(1, rows.predicted + 1))
    assert torch.equal(inputs[kept] + 1, targets[kept])
    assert length - 1 - rows.predicted < rows.seq
    previous, following = rows.pairs()
    assert following.tolist() == targets[kept].tolist()
    assert previous.tolist() == inputs[kept].tolist()


def test_a_quick_look_takes_rows_from_all_over() -> None:
    rows = Validation(TOKENS, 10, 4).spread(100)
    assert rows.predicted == 100
    assert rows.pairs()[0].max() > 850


def test_validation_needs_two_tokens() -> None:
    with pytest.raises(DataError, match="the held-out part has 1 tokens"):
        Validation(np.arange(1), 4, 4)


# ---- the bigram baseline


def markov(length: int, seed: int) -> np.ndarray:
    """Tokens of a first-order Markov chain over 5 states."""
    draw = np.random.default_rng(seed)
    table = np.random.default_rng(0).dirichlet(np.full(5, 0.3), size=5)
    states = [0]
    for u in draw.random(length - 1):
        states.append(min(4, int(np.searchsorted(table[states[-1]].cumsum(), u))))
    return np.array(states, np.uint16)


def explicit(tokens: np.ndarray, vocab: int, discount: float, uniform: float) -> np.ndarray:
    """p(w | v) by the equations, for all pairs."""
    counts = np.zeros((vocab, vocab))
    for v, w in itertools.pairwise(tokens):
        counts[v, w] += 1
    kinds = counts > 0
    lower = (1 - uniform) * kinds.sum(0) / kinds.sum() + uniform / vocab
    total = counts.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.maximum(counts - discount, 0) / total + discount * kinds.sum(1, keepdims=True) / total * lower
    return np.where(total > 0, found, lower)


def test_probabilities_are_those_of_the_equation_and_sum_to_one() -> None:
    tokens = markov(300, 1)
    counted = count_pairs(tokens, 8)
    model = Bigram(counted.codes, counted.counts, 8, discount=0.6, uniform=0.01)
    expected = explicit(tokens, 8, 0.6, 0.01)
    np.testing.assert_allclose(expected.sum(1), 1, rtol=1e-12)
    for v in range(8):
        found = [np.exp(-model.nats(np.array([v]), np.array([w]))) for w in range(8)]
        np.testing.assert_allclose(found, expected[v], rtol=1e-12)


def test_counting_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = markov(1000, 2)
    whole = fit_bigram(tokens, 8)
    monkeypatch.setattr("functrain.data.bigram.CHUNK", 64)
    parts = count_pairs(tokens, 8)
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert whole.counts.sum() == 999


def test_with_much_data_it_reaches_the_entropy_of_a_first_order_chain() -> None:
    train, test = markov(20000, 3), markov(20000, 4)
    table = explicit(train, 5, 0.0, 0.0)  # so many counts are the chain's own probabilities
    entropy = -np.log(table[test[:-1], test[1:]] + 1e-9).mean()
    assert fit_bigram(train, 8).nats(test[:-1], test[1:]) == pytest.approx(entropy, abs=0.01)


def test_the_discount_is_chosen_for_held_out_text() -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 20000).clip(max=499).astype(np.uint16)
    fitted, test = fit_bigram(tokens[:10000], 500), tokens[10000:]
    best = fitted.nats(test[:-1], test[1:])
    for discount, uniform in ((0.3, 1e-4), (0.3, 1e-1)):
        assert best < Bigram(fitted.codes, fitted.counts, 500, discount, uniform).nats(test[:-1], test[1:])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_texts_have_a_bigram_model(length: int) -> None:
    assert np.isfinite(fit_bigram(np.arange(length), 5).nats(np.array([0, 4]), np.array([1, 2])))
