"""Text to token ids and back: byte-level BPE trained on the corpus, or plain bytes."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from functrain.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # bytes and the end of a text


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    vocab_size: int  # ids are below it
    end: int  # the id that stands after each document

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int64, without the end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """Everything `load_tokenizer` needs."""
        ...


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token; 256 ends a document.

    >>> ByteTokenizer().encode_batch(["hé"])[0].tolist()
    [104, 195, 169]
    """

    vocab_size = 257
    end = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int64."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""
        chunks, held = [], bytearray()
        for token in ids:
            if token == self.end:
                chunks += [held.decode(errors="replace"), END_OF_TEXT]
                held = bytearray()
            else:
                held.append(token)
        return "".join([*chunks, held.decode(errors="replace")])

    def to_json(self) -> str:
        """The file's contents for `load_tokenizer`."""
        return json.dumps({"kind": "bytes"})


class BpeTokenizer:
    """Byte-level byte-pair encoding by the `tokenizers` library."""

    def __init__(self, inner: Any) -> None:
        inner.encode_special_tokens = True  # an end of text that is written out in a document is ordinary text
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        self.end: int = inner.token_to_id(END_OF_TEXT)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int64."""
        return [np.array(found.ids, np.int64) for found in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The format of the `tokenizers` library (a `tokenizer.json`)."""
        return self._inner.to_str()


def train_bpe(texts: Iterator[str], vocab_size: int) -> BpeTokenizer:
    """Learn byte-pair merges (Sennrich et al. 2016, arXiv 1508.07909) on GPT-2's byte alphabet.

    Args:
        texts: the training text.
        vocab_size: ids to make; a small text gives fewer.

    Raises:
        DataError: the vocabulary is too small to hold every byte.
    """
    from tokenizers import Tokenizer as Inner  # noqa: PLC0415  (a second of start-up that token files and bytes do not need)
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    check_vocab_size(vocab_size)
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, the library warns at the next fork
    inner.train_from_iterator(texts, trainer)
    return BpeTokenizer(inner)


def check_vocab_size(vocab_size: int) -> None:
    """Raise DataError for a vocabulary that cannot hold every byte."""
    if vocab_size < MIN_VOCAB:
        raise DataError(f"a vocabulary of {vocab_size} is too small for byte-level BPE: at least {MIN_VOCAB}, or --tokenizer bytes")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what `to_json` wrote, or any byte-level BPE `tokenizer.json` that has an end of text.

    Raises:
        DataError: the file is missing or is no such thing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text).get("kind") == "bytes":
            return ByteTokenizer()
        from tokenizers import Tokenizer as Inner  # noqa: PLC0415

        inner = Inner.from_str(text)
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"{path} is no tokenizer: {error}") from None
    if inner.token_to_id(END_OF_TEXT) is None:
        raise DataError(f"the tokenizer {path} has no token {END_OF_TEXT}")
    return BpeTokenizer(inner)
