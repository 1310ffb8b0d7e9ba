"""The shared library: built by installation, loaded or done without, sharing torch's threads."""

import ctypes
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from functrain.kernels import build, library
from functrain.kernels.adamw import PARALLEL_ELEMENTS, coefficients
from tests.adamw_cases import OPERATORS, USUAL, leaf, needs_library
from tests.helpers import assert_trees_close, assert_trees_equal

ROOT = Path(__file__).parent.parent


@needs_library
def test_the_library_is_built_and_loaded() -> None:
    assert library.available(), "build it: python -m functrain.kernels"


def load_again() -> ctypes.CDLL | None:
    return library.load.__wrapped__()


def test_without_the_library_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    with caplog.at_level(logging.INFO, logger="functrain"):
        assert load_again() is None
    assert len(caplog.records) == 1
    assert "not available" in caplog.text
    assert "python -m functrain.kernels" in caplog.text


@needs_library
def test_a_library_older_than_its_sources_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "digest", lambda: "another")
    with caplog.at_level(logging.INFO, logger="functrain"):
        assert load_again() is None
    assert "older than" in caplog.text


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(library.SWITCH, "off")
    with caplog.at_level(logging.INFO, logger="functrain"):
        assert load_again() is None
    assert len(caplog.records) == 1


@needs_library
def test_a_library_that_was_switched_off_gives_the_same_numbers() -> None:
    program = """if True:
        import torch
        from functrain.kernels import library, adamw
        assert not library.available()
        x = torch.linspace(-1, 1, 1000)
        parts = torch.ops.functrain.adamw_apply(x, x * 0.1, x * x, x.flip(0), adamw.coefficients(0.01, step=2, weight_decay=0.1))
        print([float(p.double().sum()) for p in parts])
    """
    environment = {**os.environ, library.SWITCH: "off"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    x = torch.linspace(-1, 1, 1000)
    parts = OPERATORS.adamw_apply(x, x * 0.1, x * x, x.flip(0), coefficients(0.01, step=2, weight_decay=0.1))
    assert_trees_close(json.loads(done.stdout), [float(p.double().sum()) for p in parts], rtol=1e-6)


def test_a_build_that_fails_says_why_and_keeps_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "lib.so"
    target.write_text("old")
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    with pytest.raises(build.BuildError, match="/nonexistent/compiler"):
        build.build(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@needs_library
def test_a_compiler_without_openmp_builds_a_library_of_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "OPENMP", ["-fno-such-option"])
    monkeypatch.setattr(build, "sources", lambda: [build.FOLDER / "identity.cpp"])
    build.build(tmp_path / build.LIBRARY)
    assert ctypes.CDLL(str(tmp_path / build.LIBRARY)).functrain_has_openmp() == 0


@needs_library
def test_a_rebuild_leaves_the_library_of_running_processes_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "sources", lambda: [build.FOLDER / "identity.cpp"])
    target = tmp_path / build.LIBRARY
    build.build(target)
    with target.open("rb") as mapped:
        before = mapped.read()
        monkeypatch.setattr(build, "digest", lambda: "another")
        build.build(target)
        mapped.seek(0)
        assert mapped.read() == before != target.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [pytest.param(None, marks=needs_library), "/nonexistent/compiler"])
def test_installing_builds_the_library_or_goes_on_without_a_compiler(compiler: str | None, tmp_path: Path) -> None:
    environment = {**os.environ, **({"CXX": compiler} if compiler else {})}
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "functrain/kernels" / build.LIBRARY).exists() == (compiler is None)
    assert compiler is None or "torch operations" in done.stdout + done.stderr


# ---- threads


@needs_library
def test_threads_change_no_bit_and_share_torchs_pool() -> None:
    size, c = 5 * PARALLEL_ELEMENTS + 13, coefficients(**USUAL)
    tensors = leaf(size, grad=torch.bfloat16)
    alone = OPERATORS.adamw_apply(*tensors, c)
    torch.set_num_threads(2)
    (torch.ones(1 << 20) * 2).sum()  # torch starts its threads
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
    assert_trees_equal(list(OPERATORS.adamw_apply(*tensors, c)), list(alone))
    assert sys.platform != "linux" or len(os.listdir("/proc/self/task")) == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_goes_on_with_one_thread() -> None:
    program = """if True:
        import os, torch
        from functrain.kernels import adamw
        torch.set_num_threads(2)
        x = torch.ones(1 << 20)
        def step(): torch.ops.functrain.adamw_apply(x, x, x, x, adamw.coefficients(0.1, step=1))
        step()
        child = os.fork()
        step()
        if child == 0: os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=60)
