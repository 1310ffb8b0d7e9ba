"""Real processes: a run on the standard library, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from functrain.observe import read_metrics

pytestmark = pytest.mark.slow
NANO = ["--model", "nano", "--batch", "4", "--optimizer", "adamw", "--lr", "0.003"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    source = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "FUNCTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": source}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "functrain.cli", *words]


def test_a_run_on_the_standard_library_and_a_sample_of_it(tmp_path: Path, environment: dict[str, str]) -> None:
    train = command("train", *NANO, "--steps", "40", "--held-out", "0.003", "--out", "run")
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"validation loss: \d\.\d+ nats a token; interpolated bigram model: \d\.\d+; the model is", done.stdout)
    assert "Warning" not in done.stderr
    generate = command("generate", "run", "--prompt", "import ", "--tokens", "20")
    first, again = (subprocess.run(generate, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300) for _ in range(2))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == again.stdout
    assert first.stdout.startswith("import ")


@pytest.mark.parametrize(("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_ctrl_c_stops_after_the_step_and_what_was_reached_is_saved(
    tmp_path: Path, environment: dict[str, str], number: int, status: int, name: str
) -> None:
    train = command("train", *NANO, "--steps", "100000", "--tokenizer", "bytes", "--out", "run")
    process = subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and len(read_metrics(metrics)) > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    steps = len(read_metrics(metrics))
    assert f"stopped by {name} after {steps} steps" in out
    assert "Traceback" not in err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "tokenizer.json",
        "weights.safetensors",
    ]
    generate = subprocess.run(command("generate", "run", "--tokens", "3"), cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert generate.returncode == 0


def test_ctrl_c_before_the_first_step_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    train = command("train", *NANO, "--out", "run")
    process = subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    cache = tmp_path / "cache"
    deadline = time.monotonic() + 120
    while not (cache.is_dir() and any(cache.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)  # until the tokenizer is being learned
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err == "functrain: interrupted\n"
    assert out == ""
    assert not (tmp_path / "run").exists()
    assert list(cache.iterdir()) == []


PLAN = """
mesh = {data = 2}
batch = ["data"]

[[zero]]
stage = 2
axis = "data"
min_size = 0
"""


def test_two_ranks_with_a_plan_end_with_the_weights_of_one(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    losses = []
    for options in ([], ["--nproc", "2"], ["--plan", "plan.toml"]):
        train = command("train", *NANO, *options, "--tokenizer", "bytes", "--steps", "6", "--held-out", "0.0005", "--out", "run")
        done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("validation loss:") == 1
        losses.append([(r["loss"], r["grad_norm"]) for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r])
    for found in losses[1:]:
        assert found == [(pytest.approx(a, rel=1e-5), pytest.approx(b, rel=1e-4)) for a, b in losses[0]]


def test_ctrl_c_stops_all_ranks_at_one_step(tmp_path: Path, environment: dict[str, str]) -> None:
    train = command("train", *NANO, "--nproc", "2", "--steps", "100000", "--tokenizer", "bytes", "--out", "run")
    process = subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and len(read_metrics(metrics)) > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert f"after {len(read_metrics(metrics))} steps" in out
    assert "Traceback" not in err
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_a_plan_that_is_wrong_is_one_sentence(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "plan.toml").write_text("mesh = {data = 2}\nbach = ['data']")
    for options, message in ((["--plan", "plan.toml"], "has no key 'bach'"), (["--plan", "none.toml"], "cannot be read")):
        done = subprocess.run(command("train", *options), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
