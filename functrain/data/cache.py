"""A folder for what can be made again: written beside its place and renamed, so that it is whole or not there."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from functrain.data.errors import DataError


def cache_folder() -> Path:
    """`$FUNCTRAIN_CACHE`, else `functrain` in `$XDG_CACHE_HOME`, else `~/.cache/functrain`."""
    own = os.environ.get("FUNCTRAIN_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "functrain"


def cached(name: str, intact: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made when it is missing or damaged.

    Args:
        name: says everything that the contents depend on.
        intact: whether a folder that is there is whole.
        make: fills a new folder.

    Raises:
        DataError: the cache cannot be written.
    """
    place = cache_folder() / name
    if place.is_dir() and intact(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=place.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            make(made)
            if place.is_dir() and not intact(place):
                shutil.rmtree(place)
            with contextlib.suppress(FileExistsError):  # another process was faster
                _rename(made, place)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"the cache {cache_folder()} cannot be written: {reason}; set FUNCTRAIN_CACHE to a folder with space") from None
    return place


def _rename(source: Path, target: Path) -> None:
    """Rename a folder; a target that is there and not empty is FileExistsError on every system."""
    try:
        source.rename(target)
    except OSError:
        if target.is_dir():
            raise FileExistsError(str(target)) from None
        raise
