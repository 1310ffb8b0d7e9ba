"""The rules that the code keeps for itself: rooms import upwards only, private torch in one file, no pickle, short files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "functrain"
FILES = sorted(PACKAGE.rglob("*.py"))

# Rooms from the first to the last; a room imports rooms before it (or itself). `kernels` and `torch_internals` are open to all.
ROOMS = ["torch_internals", "kernels", "tree", "random", "pure", "optim", "sharding", "compile", "job"]
PURE = {"precision", "differentiate", "transforms", "batching", "accumulate", "remat", "tiled", "state", "module", "losses", "layers"}
JOB = {"data", "models", "observe", "launch", "cli", "train"}


def room(module: str) -> str:
    """The room of a module of the package, such as `functrain.compile.jit`."""
    part = module.split(".")[1] if "." in module else "job"
    if part in PURE:
        return "pure"
    if part in JOB or part.startswith(("cli", "train")):
        return "job"
    return "random" if part.startswith("random") else part


def module_of(file: Path) -> str:
    return ".".join(["functrain", *file.relative_to(PACKAGE).with_suffix("").parts])


def imports(file: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}" if node.module == "functrain" else node.module, node.lineno) for alias in node.names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_rooms_import_upwards_only(file: Path) -> None:
    if file.parent == PACKAGE and file.name == "__init__.py":
        return
    here = room(module_of(file))
    for module, line in imports(file):
        if module.startswith("functrain"):
            there = room(module)
            assert there in ROOMS, f"{file.name}:{line}: {module} is in no room"
            assert ROOMS.index(there) <= ROOMS.index(here), f"{file.name}:{line}: {here} must not import {there} ({module})"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_private_torch_is_in_one_file(file: Path) -> None:
    if file.name == "torch_internals.py":
        return
    private = ("torch._", "torch.fx.experimental", "torch.utils._", "torch.fx.traceback", "torch.testing._", "torch.distributed._")
    for module, line in imports(file):
        assert not module.startswith(private), f"{file.name}:{line} imports {module}; import it in torch_internals.py with its reason"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            public = not node.attr.startswith("_") or node.attr.startswith("__")
            assert public, f"{file.name}:{node.lineno} uses torch.{node.attr}; name it in torch_internals.py with its reason"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_nothing_pickles_and_files_are_short(file: Path) -> None:
    names = {module.split(".")[0] for module, _ in imports(file)}
    if file.name == "launch.py":  # a launch sends functions to processes of its own, and nothing that is kept
        names -= {"pickle", "cloudpickle"}
    assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert "torch.load(" not in file.read_text()
    assert len(file.read_text().splitlines()) <= 420


def test_functions_are_short() -> None:
    lengths = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node) is not None
                start = node.body[1].lineno if documented and len(node.body) > 1 else node.body[0].lineno
                lengths.append((node.end_lineno or start) - start + 1)
    lengths.sort()
    assert lengths[len(lengths) // 2] <= 12
    assert lengths[int(0.9 * len(lengths))] <= 50


def test_importing_costs_little_more_than_torch() -> None:
    script = "import functrain, sys; print(*(m for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"jax", "matplotlib", "tokenizers", "rich", "transformers", "tensorstore", "safetensors", "torch._inductor.compile_fx"}
    assert not heavy & set(loaded)


def test_every_public_name_is_documented() -> None:
    import functrain as ft  # noqa: PLC0415

    names = [name for name in vars(ft) if not name.startswith("_")]
    undocumented = [name for name in names if not (getattr(ft, name).__doc__ or "").strip()]
    assert not undocumented


def test_every_public_function_shows_an_example() -> None:
    import functrain as ft  # noqa: PLC0415

    functions = [getattr(ft, name) for name in vars(ft) if not name.startswith("_")]
    bare = [f.__name__ for f in functions if callable(f) and not isinstance(f, type) and ">>>" not in (f.__doc__ or "")]
    assert not bare
