"""Compile every ``functrain/kernels/*.cpp`` into one shared library beside this file.

``pip install`` runs this through ``setup.py``; ``python -m functrain.kernels`` does the same in place, for development. Nothing is
compiled when functrain is imported or runs. To add a kernel, add a ``.cpp`` here whose functions are ``extern "C"`` and thread by OpenMP
pragmas with an explicit ``num_threads``, rebuild, and call it by ``functrain.kernels.library.function``.

No ``-march``: the library runs on any processor of its architecture. A hot loop carries ``CLONES`` (``portable.h``), which compiles it for
AVX-512, AVX2 and the baseline and picks at load time; on aarch64 the baseline has NEON. Floating point is strict (no contraction, no
reordering), so every clone gives the same bits. ``setup.py`` loads this file by its path: it imports nothing of functrain.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "libfunctrain_kernels.so"
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-Wall", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
OPENMP = ["-fopenmp"]


class BuildError(RuntimeError):
    """No compiler was found, or each one failed; the message has what the last one said."""


def sources() -> list[Path]:
    """The C++ files that make the library, in order; empty in an installation without them."""
    return sorted(FOLDER.glob("*.cpp"))


def digest() -> str:
    """A hash of the sources and headers, built into the library so that an old one is recognised."""
    total = hashlib.sha256()
    for path in [*sources(), *sorted(FOLDER.glob("*.h"))]:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def compilers() -> list[list[str]]:
    """The C++ compilers to try, best first: ``$CXX``, then what is on the path."""
    chosen = os.environ.get("CXX", "").split()
    found = [[name] for name in ("g++", "clang++", "c++") if shutil.which(name)]
    return [chosen] if chosen else found


def build(target: Path) -> str:
    """Compile the library to a path, replacing what is there only when that succeeded.

    OpenMP is left out where a compiler lacks it (Apple's clang): the kernels then run on one thread.

    Returns:
        The command that worked.

    Raises:
        BuildError: no compiler, or none that can compile the sources.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    problem = "no C++ compiler found; install g++ or clang++, or set CXX"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / LIBRARY
        for compiler in compilers():
            for extra in (OPENMP, []):
                command = [*compiler, *FLAGS, *extra, f'-DFUNCTRAIN_SOURCES="{digest()}"', *map(str, sources()), "-o", str(made)]
                done = _run(command)
                if done is None:
                    os.replace(made, target)
                    return " ".join(command)
                problem = done
    raise BuildError(problem)


def _run(command: list[str]) -> str | None:
    """What went wrong, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr[-4000:]}"


def main() -> int:
    """Build in place."""
    try:
        print(build(FOLDER / LIBRARY))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
