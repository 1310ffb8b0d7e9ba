"""Token ids in memory-mapped files: `.npy`, or raw `.bin` with a JSON file beside it.

The JSON file of `tokens.bin` is `tokens.json`: `{"dtype": "uint16", "count": 1000000, "vocab_size": 32000}`; `tokenizer` may name a
tokenizer file in the same folder. `.npy` holds a one-dimensional array of integers, and may have a `.json` for the last two.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from functrain.data.errors import DataError

CHUNK = 1 << 24  # ids looked at together
SUFFIXES = (".bin", ".npy")


@dataclass(frozen=True)
class TokenFile:
    """The contents of a token file."""

    tokens: np.ndarray  # ids, an integer memory map [count]
    vocab_size: int  # all ids are below it
    tokenizer: Path | None  # the file that tells what they mean


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The narrowest dtype that holds all ids.

    >>> smallest_dtype(50257)
    dtype('uint16')
    """
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_tokens(path: Path, parts: Iterable[np.ndarray], vocab_size: int, tokenizer: str | None = None) -> int:
    """Write a `.bin` file and its `.json`; returns how many ids it holds. Neither is atomic: write into a new folder and rename that.

    Args:
        path: ends in `.bin`.
        parts: integer arrays, written one after another.
        vocab_size: ids are below it.
        tokenizer: name of a tokenizer file in the same folder.
    """
    dtype, count = smallest_dtype(vocab_size), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).tobytes())
            count += len(part)
    about = {"dtype": str(dtype), "count": count, "vocab_size": vocab_size, **({"tokenizer": tokenizer} if tokenizer else {})}
    path.with_suffix(".json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return count


def open_tokens(path: Path, check: bool = True) -> TokenFile:
    """Map a token file into memory.

    Args:
        path: `.bin` or `.npy`.
        check: whether to look at every id; a file of our own need not be.

    Raises:
        DataError: the file is missing, empty, cut short, holds no integers, or an id outside the vocabulary.
    """
    if not path.is_file():
        raise DataError(f"no such token file: {path}")
    about = _read_about(path)
    tokens = _map_npy(path) if path.suffix == ".npy" else _map_bin(path, about)
    if not len(tokens):
        raise DataError(f"{path} holds no tokens")
    vocab_size = about.get("vocab_size")
    if check or vocab_size is None:
        vocab_size = _check_ids(path, tokens, vocab_size)
    name = about.get("tokenizer")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise DataError(f"{path.with_suffix('.json')} names the tokenizer {name!r}; it must lie in the same folder")
    return TokenFile(tokens, vocab_size, path.with_name(name) if name else None)


def _read_about(path: Path) -> dict[str, Any]:
    beside = path.with_suffix(".json")
    if not beside.is_file():
        if path.suffix == ".npy":
            return {}
        raise DataError(f'{path} needs {beside.name} beside it, such as {{"dtype": "uint16", "count": 1000, "vocab_size": 32000}}')
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{beside} is not JSON: {error}") from None
    vocab_size = about.get("vocab_size") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not (vocab_size is None or (isinstance(vocab_size, int) and vocab_size > 0)):
        raise DataError(f"{beside} must be an object whose vocab_size is a positive number")
    return about


def _map_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is no .npy file of numbers: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        finite = np.isfinite(tokens.reshape(-1)[:CHUNK]) if tokens.dtype.kind == "f" else np.ones(1, bool)
        hint = "" if finite.all() else f" (position {np.argmin(finite)} is not even finite)"
        raise DataError(
            f"{path} holds {tokens.dtype} of shape {list(tokens.shape)}{hint}; token ids are a one-dimensional array of integers"
        )
    return tokens


def _map_bin(path: Path, about: dict[str, Any]) -> np.ndarray:
    try:
        dtype = np.dtype(about["dtype"])
    except (KeyError, TypeError):
        raise DataError(f"{path.with_suffix('.json')} names no dtype such as uint16") from None
    size = path.stat().st_size
    if dtype.kind not in "iu":
        raise DataError(f"{path.with_suffix('.json')} says dtype {dtype}; token ids are integers")
    count = about.get("count", size // dtype.itemsize)
    if not isinstance(count, int) or count * dtype.itemsize != size:
        raise DataError(f"{path} has {size} bytes, which are not {count} ids of {dtype}: it is cut short or has another dtype")
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)


def _check_ids(path: Path, tokens: np.ndarray, vocab_size: int | None) -> int:
    """Raise for an id outside the vocabulary; without one, it is the largest id plus one."""
    largest = 0
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        low, high = int(part.min()), int(part.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            place = start + int(np.argmax((part < 0) | (part >= (vocab_size or high + 1))))
            raise DataError(f"{path} holds the id {tokens[place]} at position {place}; ids are from 0 to {(vocab_size or high + 1) - 1}")
        largest = max(largest, high)
    return vocab_size or largest + 1
