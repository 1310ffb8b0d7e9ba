"""Bad input is one clear sentence and exit status 2 (3 for a run that had to stop), without a traceback and with nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from functrain.cli import main
from functrain.cli.run_folder import RunFolder, write_whole
from functrain.observe import read_metrics

TEXT = "".join(f"def function_{i}(argument):\n    return argument + {i * i}\n\n\n" for i in range(100))
NANO = ["--model", "nano", "--tokenizer", "bytes", "--batch", "4", "--seq", "32", "--optimizer", "adamw", "--lr", "0.003", "--steps", "2"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus and some files that are none."""
    monkeypatch.setenv("FUNCTRAIN_CACHE", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("corpus.txt").write_text(TEXT)
    Path("empty.txt").write_text("")
    Path("binary.bin.txt").write_bytes(bytes(range(256)))
    Path("short.txt").write_text("too short\n" * 3)
    np.save("nan.npy", np.array([1.0, np.nan, 2.0]))
    np.save("ids.npy", np.arange(2000) % 9)
    Path("ids.json").write_text('{"vocab_size": 5}')
    Path("other").mkdir()
    Path("other/letter.txt").write_text("mine")
    return here


def one_line(text: str) -> str:
    assert text.startswith("functrain: ")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere.txt"], "no such file or folder: nowhere.txt"),
        (["--data", "empty.txt"], "empty.txt is empty"),
        (["--data", "binary.bin.txt"], "binary.bin.txt is binary, not text"),
        (["--data", "short.txt"], "a sequence of 32 tokens needs 33 training tokens, and there are 29"),
        (["--seq", "100000"], "a sequence of 100000 tokens needs 100001 training tokens"),
        (["--data", "nan.npy"], "nan.npy holds float64 of shape [3] (position 1 is not even finite); token ids are"),
        (["--data", "ids.npy"], "ids.npy holds the id 5 at position 5; ids are from 0 to 4"),
        (["--model", "tinny"], "argument --model: unknown model 'tinny'; did you mean tiny?"),
        (["--model", "zzz"], "argument --model: unknown model 'zzz'; there are nano, tiny"),
        (["--optimizer", "adam-w"], "argument --optimizer: unknown optimizer 'adam-w'; did you mean adamw?"),
        (["--bathc", "3"], "unknown option --bathc; did you mean --batch?"),
        (["--bathc=3"], "unknown option --bathc; did you mean --batch?"),
        (["--step", "3"], "unknown option --step; did you mean --steps?"),
        (["surplus"], "unexpected argument 'surplus'"),
        (["--steps", "many"], "argument --steps: 'many' is not a whole number"),
        (["--steps", "0"], "argument --steps: 0 is too small; it is at least 1"),
        (["--lr", "nan"], "argument --lr: nan is out of range; it is at least 0"),
        (["--dropout", "1"], "argument --dropout: 1 is out of range; it is at least 0 and below 1"),
        (["--batch"], "argument --batch: expected one argument"),
        (["--microbatches", "3"], "a batch of 4 rows cannot be cut into 3 equal microbatches"),
        (["--tokenizer", "bpe", "--vocab", "20"], "a vocabulary of 20 is too small for byte-level BPE"),
        (["--vocab", "300"], "--vocab is for the BPE tokenizer"),
        (["--held-out", "0"], "the held-out fraction is 0.0; it lies between 0 and 1"),
        (["--out", "other"], "the folder other holds other files and no run"),
        (["--out", "corpus.txt"], "corpus.txt is a file; give a folder with --out"),
        (["--out", "corpus.txt/run"], "the run folder corpus.txt/run cannot be written: Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_of_train(place: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    before = sorted(place.rglob("*"))
    assert main(["train", *NANO, "--data", "corpus.txt", "--out", "run", *options]) == 2
    printed = capsys.readouterr()
    assert message in one_line(printed.err)
    assert printed.out == ""
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required"),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["generate"], "the following arguments are required: RUN"),
        (["generate", "nowhere"], "nowhere is no run folder: it has no config.json"),
        (["generate", "other"], "other is no run folder: it has no config.json"),
        (["generate", "x", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
        (["generate", "x", "--temperature", "-1"], "argument --temperature: -1 is out of range"),
        (["generate", "x", "--top-k", "0"], "argument --top-k: 0 is too small"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_commands(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    assert message in one_line(capsys.readouterr().err)


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", *NANO, "--data", "corpus.txt", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in one_line(capsys.readouterr().err)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *NANO, "--data", "nowhere.txt", "--debug"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("functrain: no such file or folder: nowhere.txt\n")


@pytest.mark.parametrize("command", [[], ["train"], ["generate"]])
def test_help_is_no_error(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage: functrain" in printed
    if command:
        assert "Exit status: 0 done; 2 bad input; 3 a run that had to stop; 130" in " ".join(printed.split())


# ---- damaged runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCTRAIN_CACHE", str(folder / "cache"))
        assert main(["train", *NANO, "--data", str(folder / "corpus.txt"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def cut_weights(run: Path) -> None:
    weights = run / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def drop_a_leaf(run: Path) -> None:
    flat = load_file(run / "weights.safetensors")
    del flat["blocks/1/gate"]
    save_file(flat, run / "weights.safetensors")


def turn_a_leaf(run: Path) -> None:
    flat = load_file(run / "weights.safetensors")
    flat["blocks/0/up"] = flat["blocks/0/up"].T.contiguous()
    save_file(flat, run / "weights.safetensors")


def change_config(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"]["wings"] = 2
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "weights.safetensors is damaged"),
        (drop_a_leaf, "blocks/1/gate is None, and should be [64, 176]"),
        (turn_a_leaf, "blocks/0/up is [176, 64], and should be [64, 176]"),
        (change_config, "config.json describes no model"),
        (lambda run: (run / "config.json").write_text("{"), "config.json describes no model"),
        (lambda run: (run / "weights.safetensors").unlink(), "has no weights yet"),
        (lambda run: (run / "tokenizer.json").write_text("{}"), "tokenizer.json is no tokenizer"),
    ],
)
def test_a_damaged_run_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], message: str
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    damage(run)
    assert main(["generate", str(run)]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_a_prompt_of_words_needs_a_tokenizer(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    (run / "tokenizer.json").unlink()
    assert main(["generate", str(run), "--prompt", "def f"]) == 2
    assert "give the prompt as ids" in one_line(capsys.readouterr().err)
    assert main(["generate", str(run), "--prompt", "999"]) == 2
    assert "the prompt holds the id 999" in one_line(capsys.readouterr().err)


# ---- runs that have to stop


def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_good_weights_are_kept(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--optimizer", "sgd", "--lr", "1e30", "--clip", "1e30", "--warmup", "0", "--steps", "50"]
    assert main(["train", *NANO, "--data", "corpus.txt", "--out", "run", *options]) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("functrain: the run stopped at step ")
    assert "the weights before that step are kept in run; try a lower --lr" in message
    records = read_metrics(place / "run" / "metrics.jsonl")
    assert records[-1]["loss"] is None or records[-1]["grad_norm"] is None
    params, _, _ = RunFolder(Path("run")).load()
    assert all(leaf.isfinite().all() for leaf in [params["embed"], *params["blocks"][0].values()])
    assert (place / "run" / "loss.png").is_file()


def test_a_full_disk_for_metrics_stops_the_run_and_the_weights_are_kept(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")  # an earlier run's
    (run / "metrics.jsonl").symlink_to("/dev/full")
    assert main(["train", *NANO, "--data", "corpus.txt", "--out", "run"]) == 3
    assert "the run stopped: the metrics run/metrics.jsonl cannot be written: No space left on device" in capsys.readouterr().err
    RunFolder(run).load()


def limited(size: int, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that may not write files of more than `size` bytes."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    script = f"{limit}; import sys; from functrain.cli import main; sys.exit(main({argv!r}))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_disk_without_room_for_the_weights_stops_the_run_without_half_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    done = limited(200_000, ["train", *NANO, "--data", "corpus.txt", "--out", "run"])
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == "functrain: the run stopped: run cannot be written: File too large"
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (place / "run").iterdir()) == ["config.json", "metrics.jsonl", "tokenizer.json"]


def test_a_file_is_replaced_and_never_written_in_place(tmp_path: Path) -> None:
    path, reader = tmp_path / "x.txt", tmp_path / "reader"
    path.write_text("before")
    os.link(path, reader)  # as one who has the old file open
    write_whole(path, lambda scratch: scratch.write_text("after"))
    assert (path.read_text(), reader.read_text()) == ("after", "before")


def test_a_file_that_cannot_be_written_whole_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("before")

    def half(scratch: Path) -> None:
        scratch.write_text("hal")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, half)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["x.txt"]
    assert path.read_text() == "before"
