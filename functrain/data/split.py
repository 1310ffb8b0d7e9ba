"""Which text is held out for validation.

With 20 documents or more, whole documents are held out: those with the smallest hashes of their content, so the choice depends on nothing
but the text, and a document that occurs twice lies on one side with its copies. With fewer, the last part of the text is held out, cut at
the end of a line. Tokenizer, baseline and model see the training side only.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from functrain.data.corpus import Corpus, Piece
from functrain.data.errors import DataError

MIN_DOCUMENTS = 20  # with fewer, the tail is held out


@dataclass(frozen=True)
class Survey:
    """What one reading of a corpus tells."""

    hashes: np.ndarray  # of each document's content, uint64 [documents]
    lengths: np.ndarray  # characters of each document, int64 [documents]
    fingerprint: str  # of the whole corpus, hexadecimal


@dataclass(frozen=True)
class Split:
    """The held-out part of a corpus."""

    held_out: np.ndarray | None  # which documents, bool [documents]; None: the tail
    tail: int  # characters before the tail, where the tail is held out
    description: str  # for people


def survey(corpus: Corpus) -> Survey:
    """Read a corpus once.

    Raises:
        DataError: it holds no text, or cannot be read.
    """
    hashes, lengths, whole = [], [], hashlib.sha256()
    content, length = hashlib.sha256(), 0
    for piece in corpus.read():
        content.update(piece.text.encode())
        length += len(piece.text)
        if piece.last:
            whole.update(content.digest())
            hashes.append(int.from_bytes(content.digest()[:8], "big"))
            lengths.append(length)
            content, length = hashlib.sha256(), 0
    if not any(lengths):
        raise DataError(f"{corpus.name} holds no text")
    return Survey(np.array(hashes, np.uint64), np.array(lengths, np.int64), whole.hexdigest())


def choose_split(found: Survey, fraction: float) -> Split:
    """Hold out about a fraction of the characters.

    >>> few = Survey(np.array([7, 3], np.uint64), np.array([900, 100]), "")
    >>> choose_split(few, 0.1).tail
    900
    """
    total = int(found.lengths.sum())
    if len(found.hashes) < MIN_DOCUMENTS:
        return Split(None, total - round(total * fraction), f"the last {fraction:.0%} of the text")
    order = np.argsort(found.hashes, kind="stable")
    count = max(1, int(np.searchsorted(np.cumsum(found.lengths[order]), total * fraction)))
    held_out = found.hashes <= found.hashes[order[count - 1]]
    return Split(held_out, 0, f"{int(held_out.sum())} of {len(held_out)} documents, chosen by a hash of their content")


def divide(corpus: Corpus, split: Split) -> Iterator[tuple[bool, Piece]]:
    """Read a corpus again: pairs (held out, piece)."""
    return _by_document(corpus, split.held_out) if split.held_out is not None else _by_position(corpus, split.tail)


def _by_document(corpus: Corpus, held_out: np.ndarray) -> Iterator[tuple[bool, Piece]]:
    number = 0
    for piece in corpus.read():
        if number == len(held_out):
            raise DataError(f"{corpus.name} changed while it was read; start again")
        yield bool(held_out[number]), piece
        number += piece.last


def _by_position(corpus: Corpus, tail: int) -> Iterator[tuple[bool, Piece]]:
    position, inside = 0, False
    for piece in corpus.read():
        end = position + len(piece.text)
        if inside or end <= tail:
            yield inside, piece
        else:
            line = piece.text.find("\n", tail - position) + 1
            cut = line if 0 < line < len(piece.text) else tail - position
            yield False, Piece(piece.text[:cut], last=False)
            yield True, Piece(piece.text[cut:], piece.last)
            inside = True
        position = end
