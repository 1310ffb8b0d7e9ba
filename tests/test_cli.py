"""`functrain train` and `functrain generate` on small models: what a run leaves behind, and that it can be read back."""

import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import functrain as ft
from functrain import tree
from functrain.cli import main
from functrain.cli import train as training
from functrain.cli.interrupt import Interrupt
from functrain.cli.run_folder import RunFolder
from functrain.cli.settings import TrainSettings
from functrain.cli.step import make_program, make_schedule
from functrain.data import write_tokens
from functrain.models import gpt
from functrain.observe import read_metrics
from tests.helpers import assert_trees_close, assert_trees_equal

TEXT = "".join(f"def function_{i}(argument):\n    return argument + {i * i}\n\n\n" for i in range(400))
NANO = ["--model", "nano", "--tokenizer", "bytes", "--batch", "4", "--seq", "32", "--optimizer", "adamw", "--lr", "0.003"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path / "corpus.txt"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run, made once."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCTRAIN_CACHE", str(folder / "cache"))
        assert (
            main(
                ["train", *NANO, "--data", str(folder / "corpus.txt"), "--steps", "30", "--eval-every", "10", "--out", str(folder / "run")]
            )
            == 0
        )
    return folder / "run"


# ---- training


def test_a_run_reports_and_leaves_what_it_promises(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "20", "--eval-every", "8", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "tokenizer.json",
        "weights.safetensors",
    ]
    records = read_metrics(out / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert all(record[name] > 0 for record in steps for name in ("loss", "grad_norm", "lr", "tokens_per_second", "seconds"))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    looks = [record for record in records if "validation_loss" in record]
    assert [record["step"] for record in looks] == [8, 16, 20]
    printed = capsys.readouterr()
    found = re.search(
        r"validation loss: (\S+) nats a token; interpolated bigram model: (\S+); the model is (\S+) (above|below) it", printed.out
    )
    assert found is not None
    model, bigram, difference = (float(found[i]) for i in (1, 2, 3))
    assert (model, bigram) == (pytest.approx(looks[-1]["validation_loss"], abs=1e-4), pytest.approx(looks[-1]["bigram_loss"], abs=1e-4))
    assert difference == pytest.approx(abs(bigram - model), abs=2e-4)
    assert (found[4] == "below") == (model < bigram)
    assert f"plot: {out / 'loss.png'}" in printed.out
    assert "a sample" in printed.out
    assert "Warning" not in printed.err
    assert "step 20/20" in printed.err


def test_the_model_learns_what_a_bigram_cannot(corpus: Path, tmp_path: Path) -> None:
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "150", "--batch", "8", "--out", str(tmp_path / "run")]) == 0
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["validation_loss"] < last["bigram_loss"] - 0.2


def test_saved_weights_give_the_validation_loss_that_was_printed(finished: Path) -> None:
    params, config, tokenizer = RunFolder(finished).load()
    assert tokenizer is not None
    text = TEXT[len(TEXT) - round(0.03 * len(TEXT)) :]
    text = TEXT[TEXT.index("\n", len(TEXT) - round(0.03 * len(TEXT))) + 1 :]
    ids = np.append(tokenizer.encode_batch([text])[0], tokenizer.end)
    rows = (len(ids) - 1) // 32
    tokens, targets = torch.from_numpy(ids[: rows * 32].reshape(rows, 32)), torch.from_numpy(ids[1 : rows * 32 + 1].reshape(rows, 32))
    loss = F.cross_entropy(gpt.apply(params, tokens, config).flatten(0, 1), targets.flatten())
    last = read_metrics(finished / "metrics.jsonl")[-1]
    assert float(loss) == pytest.approx(last["validation_loss"], rel=1e-5)
    assert last["validation_tokens"] == rows * 32


def test_the_same_seed_gives_the_same_run(corpus: Path, tmp_path: Path) -> None:
    losses = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = ["--data", str(corpus), "--steps", "4", "--dropout", "0.1", "--seed", seed, "--out", str(tmp_path / name)]
        assert main(["train", *NANO, *options]) == 0
        losses[name] = [record.get("loss") for record in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert losses["a"] == losses["b"] != losses["c"]


@pytest.mark.parametrize(
    "options",
    [
        ["--microbatches", "2"],
        ["--remat"],
        ["--precision", "bf16"],
        ["--optimizer", "muon", "--lr", "0.02"],
        ["--optimizer", "lion", "--lr", "1e-3"],
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_options_change_how_it_is_computed_and_not_what_is_learned(corpus: Path, tmp_path: Path, options: list[str]) -> None:
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "12", "--out", str(tmp_path / "plain")]) == 0
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "12", *options, "--out", str(tmp_path / "other")]) == 0
    plain, other = ([r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in r] for name in ("plain", "other"))
    if options[0] in ("--microbatches", "--remat"):
        np.testing.assert_allclose(other, plain, rtol=1e-4)
    else:
        assert other[0] == pytest.approx(plain[0], abs=0.02)
        assert other[-1] < other[0] - 0.5


def folder_corpus(path: Path) -> Path:
    (path / "texts").mkdir()
    for i in range(30):
        (path / "texts" / f"{i}.txt").write_text(TEXT[i * 300 : i * 300 + 300])
    return path / "texts"


def json_lines(path: Path) -> Path:
    (path / "x.jsonl").write_text("".join(json.dumps({"body": TEXT[i : i + 500]}) + "\n" for i in range(0, 15000, 500)))
    return path / "x.jsonl"


def token_file(path: Path) -> Path:
    write_tokens(path / "x.bin", [np.arange(9000) % 50], 50)
    return path / "x.bin"


@pytest.mark.parametrize("make", [folder_corpus, json_lines, token_file])
def test_every_kind_of_data_trains_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path]) -> None:
    options = ["--data", str(make(tmp_path)), "--field", "body", "--steps", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *NANO, *options]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "--tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert (len(text.split()) == 6) == (make is token_file)


def test_a_run_may_be_repeated_in_its_folder(finished: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for steps in (6, 3):
        assert main(["train", *NANO, "--data", str(corpus), "--steps", str(steps), "--out", str(out)]) == 0
    assert [r["step"] for r in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 3]


def test_a_run_without_a_name_gets_a_folder_of_its_own(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "1"]) == 0
    (out,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"nano-\d{8}-\d{6}", out.name)


def test_a_run_ends_when_its_minutes_are_over(corpus: Path, tmp_path: Path) -> None:
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "500", "--minutes", "0", "--out", str(tmp_path / "run")]) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 1]
    assert "validation_loss" in records[-1]


def test_ctrl_c_finishes_the_step_and_saves(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = training.validate

    def interrupted(*args: object) -> float:
        signal.raise_signal(signal.SIGINT)
        return validate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "validate", interrupted)
    out = tmp_path / "run"
    assert main(["train", *NANO, "--data", str(corpus), "--steps", "50", "--eval-every", "3", "--out", str(out)]) == 130
    assert [r["step"] for r in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 3, 4]
    assert "stopped by Ctrl-C after 4 steps" in capsys.readouterr().out
    assert (out / "loss.png").is_file()
    assert main(["generate", str(out), "--tokens", "3"]) == 0


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the step


def small_program(**changes: object) -> tuple[TrainSettings, gpt.Config]:
    settings = TrainSettings(**{"steps": 10, "warmup": 3, "optimizer": "adamw", "lr": 1e-2, **changes})  # type: ignore[arg-type]
    return settings, gpt.Config(vocab_size=40, context=8, layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24)


def make_batches(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(40, (count, 4, 9), generator=torch.Generator().manual_seed(0))
    return [{"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()} for row in rows]


def test_steps_equal_a_plain_pytorch_loop() -> None:
    settings, config = small_program(clip=0.3, weight_decay=0.2)
    program = make_program(settings, config)
    state = program.init(ft.random.key(1))
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params)
    by_path = dict(tree.leaves_with_path(params))
    matrices = [x for path, x in by_path.items() if path.startswith("blocks") and x.ndim == 2]
    others = [x for path, x in by_path.items() if not (path.startswith("blocks") and x.ndim == 2)]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for i, batch in enumerate(make_batches(10)):
        lr = lr_by_hand(i)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = F.cross_entropy(gpt.apply(params, batch["tokens"], config).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(by_path.values(), 0.3)
        optimizer.step()
        state, measured = program.step(state, batch)
        assert_trees_close(measured, {"loss": loss, "grad_norm": norm, "lr": torch.tensor(lr)}, rtol=2e-5)
    assert_trees_close(state.params, params, rtol=1e-4, atol=1e-5)
    assert int(state.step) == 10


def lr_by_hand(step: int) -> float:
    """The schedule of `small_program`: up over 3 steps, then half a cosine to a twentieth at step 10."""
    if step < 3:
        return 1e-2 * (step + 1) / 4
    return 1e-2 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - 3) / 7)))


def test_the_schedule_reaches_its_peak_and_its_end() -> None:
    schedule = make_schedule(small_program()[0])
    for step in range(10):
        assert float(schedule(torch.tensor(step))) == pytest.approx(lr_by_hand(step), rel=1e-5)
    one = make_schedule(TrainSettings(steps=1))  # shorter than any warm-up
    assert float(one(torch.tensor(0))) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(optimizer: str) -> None:
    settings, config = small_program(optimizer=optimizer, lr=0.01)
    program = make_program(settings, config)
    first, second = make_batches(2)
    state, _ = program.step(program.init(ft.random.key(0)), first)
    poisoned = state.replace(params={**state.params, "norm": state.params["norm"].clone().fill_(float("inf"))})
    before = tree.map(torch.clone, poisoned)
    after, measured = program.step(poisoned, second)
    assert not math.isfinite(float(measured["loss"]) + float(measured["grad_norm"]))
    assert_trees_equal(after, before)


def test_evaluation_computes_in_the_precision_of_training() -> None:
    settings, config = small_program(precision="bf16")
    program = make_program(settings, config)
    state, (batch,) = program.init(ft.random.key(0)), make_batches(1)
    half = gpt.loss(tree.cast(state.params, torch.bfloat16), batch, config)
    assert_trees_close(program.evaluate(state.params, batch), half, rtol=1e-6)


# ---- generating


def test_generating_depends_on_the_seed_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for name, options in {"a": [], "b": [], "c": ["--seed", "1"], "greedy": ["--temperature", "0"], "one": ["--top-k", "1"]}.items():
        assert main(["generate", str(finished), "--prompt", "def func", "--tokens", "80", *options]) == 0
        texts[name] = capsys.readouterr().out
    assert texts["a"] == texts["b"] != texts["c"]
    assert texts["greedy"] == texts["one"] != texts["a"]
    assert all(text.startswith("def func") for text in texts.values())


def test_weights_are_params_by_path_in_full_precision(finished: Path) -> None:
    flat = load_file(finished / "weights.safetensors")
    config = gpt.Config(**json.loads((finished / "config.json").read_text())["model"])
    like = gpt.init(config, ft.random.key(0))
    assert sorted(flat) == sorted(tree.paths(like))
    assert {leaf.dtype for leaf in flat.values()} == {torch.float32}
    assert (config.vocab_size, config.context, config.layers) == (257, 32, 2)
