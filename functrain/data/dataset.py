"""From a corpus to token ids on two sides, training and validation: read, split, learn the tokenizer, encode, keep in the cache."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from functrain.data.cache import cached
from functrain.data.corpus import Corpus, Piece, open_corpus, standard_library
from functrain.data.errors import DataError
from functrain.data.split import Split, choose_split, divide, survey
from functrain.data.token_file import SUFFIXES, open_tokens, write_tokens
from functrain.data.tokenizer import ByteTokenizer, Tokenizer, check_vocab_size, load_tokenizer, train_bpe

logger = logging.getLogger("functrain.data")

TOKENIZERS = ("bpe", "bytes")
_FORMAT = 1  # of the cache; a change makes old entries unused
_BATCH = 1 << 22  # characters encoded together


@dataclass(frozen=True)
class Dataset:
    """Token ids, ready for a loader."""

    name: str  # of the corpus
    train: np.ndarray  # ids, an integer memory map [tokens]
    validation: np.ndarray  # ids that no training sees, an integer memory map [tokens]
    vocab_size: int  # ids are below it
    tokenizer: Tokenizer | None  # None: a token file that names none
    split: str  # how the validation side was chosen


def prepare(
    source: Path | None = None, *, tokenizer: str = "bpe", vocab_size: int = 2048, field: str = "text", fraction: float = 0.03
) -> Dataset:
    """Token ids of a corpus; made once, then read from the cache.

    Args:
        source: a file, folder, `.jsonl`, or token file (`.bin`, `.npy`); None for the standard library's source code.
        tokenizer: "bpe", learned on the training side, or "bytes". A token file is used as it is.
        vocab_size: ids of a BPE tokenizer.
        field: of a JSON line.
        fraction: how much of the text to hold out, 0 to 1; see `functrain.data.split` for the choice.

    Raises:
        DataError: the source is missing, empty, binary or too small, or the cache cannot be written.
        ValueError: an unknown tokenizer, or a fraction that leaves nothing.
    """
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {tokenizer!r}; there are {', '.join(TOKENIZERS)}")
    if not 0 < fraction < 1:
        raise ValueError(f"the held-out fraction is {fraction}; it lies between 0 and 1")
    if source is not None and source.suffix in SUFFIXES:
        return _from_token_file(source, fraction)
    if tokenizer == "bpe":
        check_vocab_size(vocab_size)
    return _from_text(open_corpus(source, field) if source else standard_library(), tokenizer, vocab_size, fraction)


def _from_token_file(path: Path, fraction: float) -> Dataset:
    file = open_tokens(path)
    tokenizer = load_tokenizer(file.tokenizer) if file.tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > file.vocab_size:
        raise DataError(f"{path} has {file.vocab_size} ids, but its tokenizer {file.tokenizer} has {tokenizer.vocab_size}")
    cut = len(file.tokens) - round(len(file.tokens) * fraction)
    return Dataset(str(path), file.tokens[:cut], file.tokens[cut:], file.vocab_size, tokenizer, f"the last {fraction:.0%} of the tokens")


def _from_text(corpus: Corpus, kind: str, vocab_size: int, fraction: float) -> Dataset:
    found = survey(corpus)
    split = choose_split(found, fraction)
    recipe = json.dumps([_FORMAT, found.fingerprint, kind, vocab_size if kind == "bpe" else None, fraction])
    folder = cached(
        "tokens-" + hashlib.sha256(recipe.encode()).hexdigest()[:32], _intact, lambda place: _encode(place, corpus, split, kind, vocab_size)
    )
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    train, validation = (open_tokens(folder / f"{side}.bin", check=False).tokens for side in ("train", "validation"))
    return Dataset(corpus.name, train, validation, tokenizer.vocab_size, tokenizer, split.description)


def _intact(folder: Path) -> bool:
    """Whether both token files are there in their full length, and the tokenizer can be read."""
    try:
        load_tokenizer(folder / "tokenizer.json")
        return all(len(open_tokens(folder / f"{side}.bin", check=False).tokens) for side in ("train", "validation"))
    except DataError:
        return False


def _encode(place: Path, corpus: Corpus, split: Split, kind: str, vocab_size: int) -> None:
    logger.info("making the tokens of %s (kept for the next run)", corpus.name)
    pieces = lambda side: (piece for held_out, piece in divide(corpus, split) if held_out is side)  # noqa: E731
    tokenizer = ByteTokenizer() if kind == "bytes" else train_bpe((piece.text for piece in pieces(False)), vocab_size)
    for name, side in (("train", False), ("validation", True)):
        if not write_tokens(place / f"{name}.bin", _ids(pieces(side), tokenizer), tokenizer.vocab_size, "tokenizer.json"):
            raise DataError(f"{corpus.name} is too small to hold out text for validation; give a longer one")
    (place / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


def _ids(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Token ids of some pieces, with the end of text after each document."""
    end = np.array([tokenizer.end], np.int64)
    for group in _batches(pieces):
        for piece, ids in zip(group, tokenizer.encode_batch([piece.text for piece in group]), strict=True):
            yield np.concatenate([ids, end]) if piece.last else ids


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Neighbouring pieces, in groups of a few million characters."""
    total = 0

    def number(piece: Piece) -> int:
        nonlocal total
        total += len(piece.text)
        return total // _BATCH

    for _, group in groupby(pieces, key=number):
        yield list(group)
