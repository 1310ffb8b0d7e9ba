"""Real ranks: their results, the ways they end, and that nothing of them is left. About 45 s."""

import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from functrain.launch import LaunchError, current_device_name, launch, print_dist, rank_logging, world

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
real = pytest.mark.slow


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def pids_in(folder: Path) -> list[int]:
    """The processes that noted themselves there by a file."""
    return [int(file.name) for file in folder.iterdir()]


def sleepers(folder: Path, then: Callable[[], Any]) -> Callable[[], Any]:
    """Ranks that ignore SIGTERM, each with a process of its own, all noted; then rank 1 does something and rank 0 sleeps."""

    def note_and_sleep() -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own = subprocess.Popen(["sleep", "300"])
        for pid in (os.getpid(), own.pid):
            (folder / str(pid)).touch()
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.01)
        return then() if os.environ["RANK"] == "1" else time.sleep(300)

    return note_and_sleep


# Results


@real
def test_results_come_in_the_order_of_ranks_from_a_closure() -> None:
    factor = 7

    def slowest_first(shift: int) -> tuple[int, ...]:
        rank = int(os.environ["RANK"])
        time.sleep(0.2 * (2 - rank))
        return rank * factor + shift, os.getpid()

    results = launch(slowest_first, 1, nproc=3)
    assert [value for value, _ in results] == [1, 8, 15]
    assert len({pid for _, pid in results} | {os.getpid()}) == 4


@real
def test_a_class_of_the_caller_comes_back_as_that_class() -> None:
    class Pair:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    results = launch(lambda: Pair(int(os.environ["RANK"])))
    assert all(isinstance(result, Pair) for result in results)
    assert [result.rank for result in results] == [0, 1]


@real
def test_a_function_of_a_module_that_only_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("def where():\n    return __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    import found_here  # type: ignore[import-not-found]  # noqa: PLC0415

    assert launch(found_here.where, nproc=1) == [str(tmp_path / "found_here.py")]


@real
def test_a_rank_has_torchruns_environment_and_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")  # as where this process is a rank itself
    one, two = launch(lambda: dict(os.environ), env={"COLOR": "green"})
    assert [one["RANK"], two["RANK"], one["LOCAL_RANK"], two["LOCAL_RANK"]] == ["0", "1", "0", "1"]
    assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"], one["COLOR"]) == ("2", "2", "127.0.0.1", "green")
    assert one["MASTER_PORT"] == two["MASTER_PORT"]
    assert one["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert one["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert launch(lambda: os.environ["OMP_NUM_THREADS"], nproc=1, env={"OMP_NUM_THREADS": "5"}) == ["5"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(lambda: os.environ["OMP_NUM_THREADS"], nproc=1) == ["3"]


@real
def test_two_launches_at_once_reduce_each_among_their_own_ranks(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    def total(start: float) -> tuple[torch.Tensor, str]:
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
        value = torch.full((3,), start + dist.get_rank())
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value, os.environ["MASTER_PORT"]

    with ThreadPoolExecutor() as pool:
        small, big = pool.map(lambda start: launch(total, start, timeout=60), (1.0, 100.0))
    assert all(torch.equal(value, torch.full((3,), 3.0)) for value, _ in small)
    assert all(torch.equal(value, torch.full((3,), 201.0)) for value, _ in big)
    assert small[0][1] != big[0][1]
    assert not caplog.records


@real
def test_the_folder_is_private_and_removed() -> None:
    folder, mode = launch(lambda: (sys.argv[1], os.stat(sys.argv[1]).st_mode & 0o777), nproc=1)[0]
    assert mode == 0o700
    assert not Path(folder).exists()


# Failures


@real
def test_an_exception_ends_a_rank_that_waits_in_a_collective() -> None:
    def barrier() -> None:
        import torch.distributed as dist  # noqa: PLC0415

        def fail() -> None:
            raise ValueError("rank 1 has had enough")

        dist.init_process_group("gloo")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == 1:
            threading.Thread(target=time.sleep, args=(300.0,)).start()  # it does not even get out, so rank 0 keeps its connection
            fail()
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1 raised ValueError: rank 1 has had enough") as caught:
        launch(barrier, grace=0.3)
    assert time.monotonic() - start < 15
    (failure,) = caught.value.failures
    assert (failure.rank, caught.value.unfinished) == (1, (0,))
    assert re.search(r'File "[^"]*test_launch.py", line \d+, in fail\n    raise ValueError', failure.traceback)
    assert failure.traceback.rstrip() in str(caught.value)
    assert "/functrain/launch.py" not in failure.traceback


@real
def test_a_rank_that_only_suffers_is_not_named_first() -> None:
    def meet() -> None:
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # rank 0: connection closed by peer

    with pytest.raises(LaunchError, match=r"^rank 1 was ended by SIGKILL") as caught:
        launch(meet)
    assert caught.value.failures[0].status == -signal.SIGKILL


ENDINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "exception": (lambda: {}["key"], "rank 1 raised KeyError: 'key'"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was ended by SIGKILL"),
    "status": (lambda: os._exit(7), "rank 1 ended with exit status 7"),
    "no result": (lambda: os._exit(0), "rank 1 ended with exit status 0, before fn returned"),
    "on its way out": (lambda: atexit.register(os._exit, 5) and None, "rank 1 ended with exit status 5"),
    "sys.exit": (lambda: sys.exit(4), "rank 1 raised SystemExit: 4"),
    "lock": (threading.Lock, "the result, a lock, cannot be sent back: .* Return tensors"),
    "timeout": (lambda: 1, "rank 0 had not finished after 3 s"),
}


@real
@pytest.mark.parametrize(("then", "message"), ENDINGS.values(), ids=ENDINGS.keys())
def test_nothing_runs_on_however_a_rank_ends(then: Callable[[], Any], message: str, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    start = time.monotonic()
    with pytest.raises(LaunchError, match=message) as caught:
        launch(sleepers(tmp_path, then), timeout=3 if "3 s" in message else 60, grace=0.3)
    assert time.monotonic() - start < 10
    assert caught.value.unfinished == (0,)
    assert [failure.rank for failure in caught.value.failures] == ([] if "3 s" in message else [1])
    assert len(pids_in(tmp_path)) == 4
    assert wait_for(lambda: not any(map(alive, pids_in(tmp_path))), 2)
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@real
def test_a_rank_that_is_ended_may_tidy_up_first(tmp_path: Path) -> None:
    def tidy() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit((tmp_path / "tidy").write_text("yes")))
        (tmp_path / "ready").touch()
        time.sleep(300)

    def wait_and_fail() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        raise ValueError

    with pytest.raises(LaunchError, match=r"^rank 1 raised ValueError"):
        launch(lambda: [tidy, wait_and_fail][int(os.environ["RANK"])]())
    assert (tmp_path / "tidy").read_text() == "yes"


@real
def test_what_a_rank_left_running_ends_with_it() -> None:
    pids = launch(lambda: subprocess.Popen(["sleep", "300"]).pid)
    assert wait_for(lambda: not any(map(alive, pids)), 2)


@real
def test_the_last_words_of_a_rank_without_a_traceback_are_told() -> None:
    def die() -> None:
        sys.stderr.write("out of luck\n")
        os.abort()

    with pytest.raises(LaunchError, match=r"(?s)rank 0 was ended by SIGABRT.*out of luck.*in die"):
        launch(die, nproc=1, stdout="quiet")


# Output


@real
def test_output_is_shown_by_whole_lines_with_the_rank_once(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print(f"[rank {os.environ['RANK']}] named\none\ntwo")  # as print_dist and the log write it
        print("no end", end="", file=sys.stderr)

    launch(speak)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(["[rank 0] named", "one", "two", "[rank 1] named", "[rank 1] one", "[rank 1] two"])
    assert sorted(err.splitlines()) == ["[rank 1] no end", "no end"]


@real
def test_output_is_shown_while_the_ranks_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def speak_and_wait() -> None:
        print("now")
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        future = pool.submit(launch, speak_and_wait, nproc=1, timeout=30)
        shown: list[str] = []
        assert wait_for(lambda: shown.append(capsys.readouterr().out) or "now" in "".join(shown))
        assert not future.done()
        (tmp_path / "go").touch()
    assert future.result() == [None]


@real
def test_output_can_be_quiet_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def shout() -> None:
        print("loud", os.environ["RANK"])
        raise ValueError("done")

    with pytest.raises(LaunchError, match=f"Logs: {tmp_path}"):
        launch(shout, stdout="quiet", log_dir=tmp_path)
    assert capsys.readouterr() == ("", "")
    (attempt,) = tmp_path.glob("*/attempt_0")
    assert (attempt / "1" / "stdout.log").read_text() == "loud 1\n"
    assert "ValueError: done" in (attempt / "1" / "traceback.txt").read_text()


@real
def test_output_can_go_where_the_caller_writes(capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: print("direct"), nproc=2, stdout="inherit")
    assert capfd.readouterr().out == "direct\n" * 2


# Callers that cannot be imported


SCRIPT = """
from functrain.launch import launch

def double(value):
    return value * int(__import__("os").environ["RANK"])

print("main runs")
print(launch(double, 21))
"""


def run(*words: str, folder: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, input=text, capture_output=True, text=True, timeout=60)


@real
def test_a_main_program_without_a_guard_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run, *words, folder=tmp_path, text=text) for words, text in [(["-c", SCRIPT], None), (["-"], SCRIPT)]]
        running.append(pool.submit(run, "script.py", folder=tmp_path))
    for done in running:
        assert (done.result().stderr, done.result().stdout) == ("", "main runs\n[0, 21]\n")


@real
def test_a_module_without_a_guard_is_refused_in_the_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("21)", "21, nproc=1)"))
    done = run("-c", "import script", folder=tmp_path)
    assert done.stdout == "main runs\nmain runs\n"  # the rank's import is the second
    assert re.search(r"LaunchError: rank 0 raised .*launch\(\) was called inside a rank", done.stderr)


# The end of the launching process


SLEEPERS = """
import sys, time
from pathlib import Path
from functrain.launch import launch

def note_and_sleep(folder):
    import os, subprocess
    for pid in (os.getpid(), subprocess.Popen(["sleep", "300"]).pid):
        (folder / str(pid)).touch()
    time.sleep(300)

try:
    launch(note_and_sleep, Path(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
"""


def end_launcher(folder: Path, number: int, status: int, text: str) -> None:
    notes, temporary = folder / "notes", folder / "temporary"
    notes.mkdir(parents=True)
    temporary.mkdir()
    command = [sys.executable, "-c", SLEEPERS, str(notes)]
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for(lambda: len(pids_in(notes)) == 4, 40)
        process.send_signal(number)
        out, _ = process.communicate(timeout=15)
        assert (process.returncode, out) == (status, text)
        assert wait_for(lambda: not any(map(alive, pids_in(notes))), 5)
        assert wait_for(lambda: not list(temporary.iterdir()), 5)
    finally:
        process.kill()


@real
def test_no_rank_outlives_the_launching_process(tmp_path: Path) -> None:
    cases = [(signal.SIGINT, 0, "interrupted\n"), (signal.SIGTERM, -15, ""), (signal.SIGKILL, -9, "")]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(end_launcher, tmp_path / number.name, number, status, text) for number, status, text in cases]
    for done in running:
        done.result()


# What the caller got wrong


def test_arguments_are_checked_before_anything_starts() -> None:
    for nproc in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="nproc must be a positive int, got"):
            launch(print, nproc=nproc)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fn must be callable, got None; give the function and its arguments apart: launch\(fn, \*args\)"):
        launch(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds or None, got 0"):
        launch(print, timeout=0)
    with pytest.raises(ValueError, match="stdout must be one of 'tail', 'inherit', 'quiet', got 'loud'"):
        launch(print, stdout="loud")  # type: ignore[arg-type]


def test_what_cannot_be_sent_is_named_with_a_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^fn, a function, cannot be sent to the ranks: .*lock.*make them inside the function"):
        launch(lambda: lock)
    with pytest.raises(TypeError, match=r"^argument 1, a lock, cannot be sent to the ranks: "):
        launch(print, 1, lock)


# By rank


def test_world_is_one_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert world() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (world().rank, world().size) == (3, 4)


def test_the_device_is_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_device_name() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert current_device_name() == "cuda:1"


@pytest.mark.parametrize(
    ("rank", "size", "all_ranks", "text"),
    [("0", "1", False, "a-b"), ("0", "1", True, "a-b"), ("0", "2", False, "a-b"), ("1", "2", False, ""), ("1", "2", True, "[rank 1] a-b")],
)
def test_print_dist(
    rank: str, size: str, all_ranks: bool, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    print_dist("a", "b", sep="-", end="", all_ranks=all_ranks)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("rank", "lines"),
    [("0", ["[rank 0] INFO functrain.x: info", "[rank 0] WARNING functrain.x: warning"]), ("1", ["[rank 1] WARNING functrain.x: warning"])],
)
def test_rank_logging(rank: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger = logging.getLogger("functrain")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        rank_logging()
        logging.getLogger("functrain.x").info("info")
        logging.getLogger("functrain.x").warning("warning")
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    assert capsys.readouterr().err.splitlines() == lines
