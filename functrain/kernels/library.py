"""Find and load the shared library of C++ kernels; without it, everything works through torch operations."""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from functrain.kernels import build

logger = logging.getLogger("functrain")

# Set to "off" to run everything through torch operations (to compare, or to rule the library out).
SWITCH = "FUNCTRAIN_KERNELS"
_IMPORTED_BY = os.getpid()


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it is switched off, was not built or is older than its sources: then one log line says so.

    It is loaded after torch, so that both share one OpenMP runtime and its threads.
    """
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        logger.info("C++ kernels are switched off by %s: using torch operations", SWITCH)
        return None
    path = build.FOLDER / build.LIBRARY
    try:
        found = ctypes.CDLL(str(path))
        found.functrain_sources.restype = ctypes.c_char_p
        built_from = found.functrain_sources().decode()
    except (OSError, AttributeError) as error:
        logger.warning("C++ kernels are not available (%s): using torch operations; build them with `python -m %s`", error, __package__)
        return None
    if build.sources() and built_from != build.digest():
        logger.warning("C++ kernels are older than their sources: using torch operations; rebuild with `python -m %s`", __package__)
        return None
    return found


def threads() -> int:
    """How many threads a kernel may use: torch's setting, and 1 in a forked child, where GNU's OpenMP hangs if its parent had used it."""
    return torch.get_num_threads() if os.getpid() == _IMPORTED_BY else 1


def available() -> bool:
    """Whether the C++ kernels are loaded."""
    return load() is not None


def function(name: str, *argument_types: Any, returns: Any = None) -> Callable[..., Any] | None:
    """A C function of the library with its types declared, or None without the library.

    Args:
        name: its plain C name.
        argument_types: ctypes types, in order; ``ctypes.c_void_p`` for pointers (pass ``tensor.data_ptr()``).
        returns: the ctypes type of the result, None for void.

    >>> has_openmp = function("functrain_has_openmp", returns=ctypes.c_int)
    >>> has_openmp is None or has_openmp() in (0, 1)
    True
    """
    found = load()
    if found is None:
        return None
    entry = found[name]
    entry.argtypes = list(argument_types)
    entry.restype = returns
    return entry
