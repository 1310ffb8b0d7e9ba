"""Where text comes from: the standard library's source code, a file, a folder, or JSON lines.

A corpus is a sequence of documents in a fixed order, read in pieces, so that a file larger than memory is no problem.
"""

import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functrain.data.errors import DataError

logger = logging.getLogger("functrain.data")

PIECE = 1 << 20  # characters read at a time
_LEFT_OUT = frozenset(("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"))


@dataclass(frozen=True)
class Piece:
    """Part of a document, or all of it."""

    text: str
    last: bool  # whether the document ends here


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order."""

    name: str  # what to call it in messages
    read: Callable[[], Iterator[Piece]]  # starts from the first document each time


def standard_library() -> Corpus:
    """The Python source of the running interpreter's standard library, sorted by path; installed packages and tests are left out.

    Raises:
        DataError: the interpreter has no such folder, or no source in it (an embedded interpreter may come without).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _files_below(root, leave_out=_LEFT_OUT) if path.suffix == ".py"] if root.is_dir() else []
    if not files:
        raise DataError(f"this interpreter has no source of its standard library in {root}; give a corpus with --data")
    return Corpus("the source code of the Python standard library", lambda: _read_files(files, "text", root))


def open_corpus(path: Path, field: str = "text") -> Corpus:
    """The documents in a file, a folder (each file a document; hidden, empty and binary ones are left out) or a `.jsonl` file.

    Args:
        path: file or folder.
        field: which field of a JSON line holds its text.

    Raises:
        DataError: the path does not exist, cannot be read, or is empty. Text that is not UTF-8, or a line that is not JSON, raises it
            when that part is read.
    """
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    if path.is_dir():
        files = _files_below(path, leave_out=frozenset(("__pycache__",)))
        if not files:
            raise DataError(f"the folder {path} holds no files")
        return Corpus(str(path), lambda: _read_files(files, field, path))
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return Corpus(str(path), lambda: _read_file(path, field))


def _files_below(root: Path, leave_out: frozenset[str]) -> list[Path]:
    """Every file below a folder that is not hidden, sorted by its path's parts."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in leave_out and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _read_files(files: Iterable[Path], field: str, root: Path) -> Iterator[Piece]:
    skipped = []
    for path in files:
        if path.stat().st_size and not _is_binary(path):
            yield from _read_file(path, field)
        else:
            skipped.append(str(path.relative_to(root)))
    if skipped:
        logger.info("left out %d files of %s that are empty or not text, such as %s", len(skipped), root, skipped[0])


def _is_binary(path: Path) -> bool:
    """Whether a file is not UTF-8 text; looks at all of it, since a folder's documents are not cut short by an error."""
    try:
        return not all(_texts(path))
    except DataError:
        return True


def _read_file(path: Path, field: str) -> Iterator[Piece]:
    return _read_lines(path, field) if path.suffix == ".jsonl" else _read_text(path)


def _read_text(path: Path) -> Iterator[Piece]:
    """A text file as one document."""
    held = None
    for text in _texts(path):
        if held is not None:
            yield Piece(held, last=False)
        held = text
    if held is not None:
        yield Piece(held, last=True)


def _texts(path: Path) -> Iterator[str]:
    """The text of a file, at most `PIECE` characters at a time; a NUL anywhere, which no text holds, is an error."""
    try:
        with path.open("rb") as start:
            binary = b"\0" in start.read(PIECE)
        with path.open(encoding="utf-8", newline="") as file:
            while not binary and (text := file.read(PIECE)):
                binary = "\0" in text
                yield text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} 0x{error.object[error.start]:02x}; convert it first") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if binary:
        raise DataError(f"{path} is binary, not text; for token ids give a .npy file, or a .bin file with its .json beside it")


def _read_lines(path: Path, field: str) -> Iterator[Piece]:
    """JSON lines: each line one document."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (text := _text_of(line, field, f"{path}, line {number}")):
                    yield Piece(text, last=True)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; JSON lines must be") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _text_of(line: str, field: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where} has no text in its field {field!r} (it has: {fields}); name another with --field")
    return record[field].encode("utf-8", "replace").decode()  # JSON can spell half a character
