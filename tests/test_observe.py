"""What a run shows of itself: log lines, metrics, progress, the plot."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pytest

from functrain.observe import MetricsError, MetricsWriter, make_progress, plot_loss, read_metrics, set_log_level
from functrain.observe.plot import _smoothed
from functrain.observe.progress import Bar, Lines

# ---- log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, put back as it was."""
    found = logging.getLogger("functrain")
    before = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = before  # type: ignore[misc]


def test_a_level_is_set_on_the_logger_and_on_its_handlers(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    other = logging.StreamHandler(io.StringIO())
    other.setLevel(logging.ERROR)
    logger.addHandler(other)
    for level, shown in (("warning", ""), ("debug", "DEBUG functrain.data: a fact\n"), ("ERROR", "")):
        set_log_level(level)
        assert {logger.level} == {handler.level for handler in logger.handlers}
        logging.getLogger("functrain.data").debug("a fact")
        assert capsys.readouterr().err == shown
    assert other.stream.getvalue() == "a fact\n"


def test_setting_it_again_prints_no_line_twice(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        set_log_level(logging.INFO)
    logger.info("one\nfact")
    assert capsys.readouterr().err == "INFO functrain: one fact\n"


def test_with_several_ranks_each_line_names_its_own(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    set_log_level("info").warning("slow disk")
    assert capsys.readouterr().err == "[rank 2] WARNING functrain: slow disk\n"


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'; there are debug, info"):
        set_log_level("loud")


# ---- metrics


def test_each_record_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(3):
            metrics.write({"step": step, "loss": 0.5})
            assert len(path.read_text().splitlines()) == step + 1
    with MetricsWriter(path, append=True) as metrics:
        metrics.write({"step": 3})
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3]
    with MetricsWriter(path):
        assert read_metrics(path) == []


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write({"loss": float("nan"), "norm": float("inf")})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"loss": None, "norm": None}


def test_a_line_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_full_disk_is_one_clear_error() -> None:
    with (
        MetricsWriter(Path("/dev/full")) as metrics,
        pytest.raises(MetricsError, match="/dev/full cannot be written: No space left on device"),
    ):
        metrics.write({"step": 1})


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be opened: No such file"):
        MetricsWriter(tmp_path / "no" / "m.jsonl")


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_no_half_line(tmp_path: Path) -> None:
    script = f"""
import resource
from pathlib import Path
from functrain.observe import MetricsError, MetricsWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # bytes: the system's own way to refuse the rest of a write
with MetricsWriter(Path({str(tmp_path / "m.jsonl")!r})) as metrics:
    try:
        for step in range(100):
            metrics.write({{"step": step, "text": "x" * 20}})
    except MetricsError as error:
        print(step, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.startswith("2 ")
    assert "cannot be written: File too large" in done.stdout
    lines = (tmp_path / "m.jsonl").read_text()
    assert lines.endswith("}\n")
    assert len(lines.splitlines()) == 2


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    with make_progress(3, stream) as progress:
        assert isinstance(progress, Lines)
        for step in (1, 2, 3):
            progress.update(step, 4 / step, 1234.5)
        progress.say("validation 1.0")
    first, last, said = stream.getvalue().splitlines()  # the second step came too soon after the first to be shown
    assert first == "step 1/3  loss 4.000  1,234 tokens/s  ?:?? left"
    assert last.startswith("step 3/3  loss 1.333")
    assert last.endswith("0:00 left")
    assert said == "validation 1.0"


def test_on_a_terminal_progress_is_a_bar() -> None:
    stream = Terminal()
    with make_progress(4, stream) as progress:
        assert isinstance(progress, Bar)
        assert "capturing the step" in stream.getvalue()
        progress.update(2, 3.25, 1000)
        progress.say("validation [1.0]")
    shown = stream.getvalue()
    for part in ("2/4", "loss 3.250", "1,000 tokens/s", "left", "validation [1.0]"):
        assert part in shown


# ---- plot


def test_the_loss_is_drawn(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 5 - step / 20} for step in range(1, 50)] + [
        {"step": 50, "validation_loss": 3.0},
        {"step": 51, "loss": None},
    ]
    plot_loss(records, tmp_path / "loss.png", baseline=4.0)
    image = matplotlib.image.imread(tmp_path / "loss.png")
    assert image.shape[:2] == (600, 960)
    colours = {tuple((pixel * 255).astype(int)) for pixel in image[:, :, :3].reshape(-1, 3)}
    assert {(31, 119, 180), (214, 39, 40), (44, 160, 44)} <= colours  # training, validation, baseline
    plot_loss(records, tmp_path / "bare.png")
    bare = matplotlib.image.imread(tmp_path / "bare.png")
    assert (44, 160, 44) not in {tuple((pixel * 255).astype(int)) for pixel in bare[:, :, :3].reshape(-1, 3)}


def test_smoothing_starts_without_bias() -> None:
    assert _smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert _smoothed([0.0, 1.0]) == pytest.approx([0.0, 1 / 1.95])
    assert _smoothed([]) == []
