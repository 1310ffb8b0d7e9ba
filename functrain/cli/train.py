"""`functrain train`: prepare the data, run the step, validate, save, and say what came of it."""

import argparse
import contextlib
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import functrain as ft
from functrain.cli.errors import StoppedError, UsageError, as_usage
from functrain.cli.generate import sample
from functrain.cli.interrupt import SIGNALS, Interrupt
from functrain.cli.ranks import Ranks, make_ranks, of_ranks, wanted_ranks
from functrain.cli.run_folder import RunFolder
from functrain.cli.settings import TrainSettings
from functrain.cli.step import Program, make_program
from functrain.data import Dataset, Loader, Prefetch, Validation, fit_bigram, prepare
from functrain.data.token_file import SUFFIXES
from functrain.launch import LaunchError, launch
from functrain.models import gpt
from functrain.observe import MetricsError, MetricsWriter, make_progress, read_metrics
from functrain.observe.progress import Progress

QUICK = 16384  # tokens of a validation during the run; the last one takes all
SAVING = 60.0  # seconds that ranks get to finish a step and save after Ctrl-C
SAMPLE = 200  # tokens of the sample at the end
_FAILED, _LATE = 1000, 1  # wishes to stop, beside the numbers of signals
INTERRUPTS = frozenset(map(int, SIGNALS))


@dataclass(frozen=True)
class Job:
    """What a run needs and does not change."""

    settings: TrainSettings
    config: gpt.Config
    dataset: Dataset
    loader: Loader
    validation: Validation
    bigram: float  # validation loss of the interpolated bigram model, nats a token
    folder: RunFolder
    device: torch.device
    ranks: Ranks

    def save_weights(self, state: ft.TrainState, step: int) -> None:
        """Write the params; every rank takes part."""
        self.folder.save_weights(self.ranks.full(state.params), step)


@dataclass(frozen=True)
class Outcome:
    """How the steps ended."""

    state: ft.TrainState
    steps: int  # that were done
    signal: int | None  # that ended them early
    seconds: float  # of training, validation and saving left out


def train_command(arguments: argparse.Namespace) -> int:
    """Train as the options say; returns the exit status."""
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(TrainSettings)}
    paths = {name: Path(fields[name]) for name in ("data", "out", "plan") if fields[name] is not None}
    settings = TrainSettings(**{**fields, **paths})
    nproc = wanted_ranks(settings)
    if nproc == 1:
        return train(settings)
    settings = dataclasses.replace(settings, out=settings.out or default_folder(settings))
    prepare_job(settings, Ranks(None))  # what is wrong is said once, and the tokenizer is trained once
    try:
        return int(launch(train, settings, nproc=nproc, stdout="inherit", grace=SAVING)[0])
    except LaunchError as error:
        raise of_ranks(error) from error


def train(settings: TrainSettings) -> int:
    """Train a GPT; see `functrain.cli.settings` for what can be set.

    Returns:
        0, or 128 plus the number of the signal that ended the run (130 for Ctrl-C); what was reached is saved all the same.

    Raises:
        UsageError, DataError: bad input; nothing was written.
        StoppedError: the run had to stop: a loss that is not finite, or a full disk.
    """
    ranks = make_ranks(settings)
    with ranks.silent():
        return _train(settings, ranks)


def _train(settings: TrainSettings, ranks: Ranks) -> int:
    job = make_job(settings, ranks)
    program = make_program(settings, job.config, ranks.plan)
    state = program.init(ft.random.key(settings.seed, device=job.device))
    about = {"training": dataclasses.asdict(settings), "data": {"name": job.dataset.name, "held_out": job.dataset.split}}
    job.folder.start(job.config, about, job.dataset.tokenizer)
    _announce(job)
    with _stops_the_run(job):
        outcome = _run(job, program, state)
        loss = None if outcome.signal else _finish(job, program, outcome)
        job.folder.save_plot(read_metrics(job.folder.metrics), job.bigram)
    _conclude(job, outcome, loss)
    return 128 + outcome.signal if outcome.signal else 0


# ---- before the first step


def default_folder(settings: TrainSettings) -> Path:
    """A new folder, named by model and time."""
    return Path("runs", f"{settings.model}-{time.strftime('%Y%m%d-%H%M%S')}")


def make_job(settings: TrainSettings, ranks: Ranks) -> Job:
    """Read the data, and find out all that could be wrong before anything is written.

    Raises:
        UsageError, DataError: bad input.
    """
    dataset, config, loader, folder, device = prepare_job(settings, ranks)
    validation = Validation(dataset.validation, config.context, settings.batch)
    bigram = fit_bigram(dataset.train, dataset.vocab_size).nats(*validation.pairs()) if ranks.leads else math.nan
    return Job(settings, config, dataset, loader, validation, bigram, folder, device, ranks)


def prepare_job(settings: TrainSettings, ranks: Ranks) -> tuple[Dataset, gpt.Config, Loader, RunFolder, torch.device]:
    """The data and the model, checked."""
    with as_usage():
        wanted = gpt.config(settings.model)
    folder = ranks.folder(settings.out or default_folder(settings))
    folder.check()
    device = _device(settings.device)
    if settings.batch % settings.microbatches:
        raise UsageError(f"a batch of {settings.batch} rows cannot be cut into {settings.microbatches} equal microbatches")
    if settings.vocab and (settings.tokenizer == "bytes" or (settings.data and settings.data.suffix in SUFFIXES)):
        raise UsageError("--vocab is for the BPE tokenizer: bytes and token files have a vocabulary of their own")
    vocab_size = settings.vocab or wanted.vocab_size
    with as_usage():
        dataset = prepare(
            settings.data, tokenizer=settings.tokenizer, vocab_size=vocab_size, field=settings.field, fraction=settings.held_out
        )
        config = dataclasses.replace(
            wanted, vocab_size=dataset.vocab_size, context=settings.seq or wanted.context, dropout=settings.dropout
        )
        loader = Loader(dataset.train, config.context, settings.batch, settings.seed, *ranks.share)
    return dataset, config, loader, folder, device


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name)


def _announce(job: Job) -> None:
    tokens = f"{len(job.dataset.train):,} tokens of {job.dataset.name}, {len(job.dataset.validation):,} held out ({job.dataset.split})"
    model = f"{job.settings.model}: {gpt.count(job.config):,} params, vocabulary {job.config.vocab_size:,}, rows of {job.config.context}"
    print(f"{tokens}\n{model}", file=sys.stderr, flush=True)


# ---- the steps


def _run(job: Job, program: Program, state: ft.TrainState) -> Outcome:
    settings, steps = job.settings, job.settings.steps
    with (
        MetricsWriter(job.folder.metrics) as metrics,
        Prefetch(job.loader, stop=steps) as batches,
        Interrupt() as interrupt,
        make_progress(steps) as progress,
    ):
        clock = _Clock(settings.batch * job.config.context)
        for position, batch in batches:
            state, measured = program.step(state, job.ranks.batch(batch, job.device))
            done, record = position + 1, {name: float(value) for name, value in measured.items()}
            failed = _note(metrics, {"step": done, **record, **clock.tick()})
            late = settings.minutes is not None and clock.seconds >= 60 * settings.minutes
            wish = job.ranks.agreed(_FAILED if failed else interrupt.number or (_LATE if late else 0))
            if wish == _FAILED:
                job.save_weights(state, done)
                raise failed or StoppedError("rank 0 cannot write its metrics")
            _check_finite(job, state, {"step": done, **record})
            progress.update(done, record["loss"], clock.rate)
            if wish or done == steps:
                job.save_weights(state, done)
                return Outcome(state, done, wish if wish in INTERRUPTS else None, clock.seconds)
            if done % settings.eval_every == 0:
                _look(job, program, state, done, metrics, progress)
                clock.skip()
    raise AssertionError("a loader without batches")


def _note(metrics: MetricsWriter, record: dict[str, Any]) -> MetricsError | None:
    """Write a step's metrics; the error where that fails."""
    try:
        metrics.write(record)
    except MetricsError as error:
        return error
    return None


def _check_finite(job: Job, state: ft.TrainState, record: dict[str, Any]) -> None:
    """Where the step was not finite (and left the state as it was), keep the state and stop."""
    if math.isfinite(record["loss"] + record["grad_norm"]):
        return
    job.save_weights(state, record["step"] - 1)
    job.folder.save_plot(read_metrics(job.folder.metrics), job.bigram)
    found = f"the loss is {record['loss']:.4g} and the norm of its gradients {record['grad_norm']:.4g}"
    kept = f"the weights before that step are kept in {job.folder.path}"
    raise StoppedError(f"the run stopped at step {record['step']}: {found}; {kept}; try a lower --lr")


class _Clock:
    """Seconds of training and tokens per second."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # of a step
        self.seconds = 0.0  # of training
        self.rate = 0.0  # tokens per second, smoothed; the first step, which captures, is forgotten at the second
        self._ticks = 0
        self._last = time.perf_counter()

    def tick(self) -> dict[str, float]:
        """A step is done; what to note of its time."""
        now = time.perf_counter()
        taken, self._last = now - self._last, now
        self.seconds += taken
        rate = self.tokens / taken
        self._ticks += 1
        self.rate = rate if self._ticks <= 2 else 0.9 * self.rate + 0.1 * rate
        return {"tokens_per_second": round(rate, 1), "seconds": round(self.seconds, 3)}

    def skip(self) -> None:
        """What came since the last step was no training."""
        self._last = time.perf_counter()


def _look(job: Job, program: Program, state: ft.TrainState, step: int, metrics: MetricsWriter, progress: Progress) -> None:
    """Validate on part of the held-out tokens, and save."""
    part = job.validation.spread(QUICK)
    loss = validate(job, program, state, part)
    metrics.write({"step": step, "validation_loss": loss, "validation_tokens": part.predicted})
    progress.say(f"step {step}  validation loss {loss:.3f} on {part.predicted:,} tokens")
    job.save_weights(state, step)


def validate(job: Job, program: Program, state: ft.TrainState, rows: Validation) -> float:
    """Mean loss on held-out rows, nats a token."""
    total = weight = 0.0
    for batch in rows.batches():
        mean = program.evaluate(state.params, {name: x.to(job.device) for name, x in batch.items()})
        total, weight = total + float(mean.total), weight + float(mean.weight)
    return total / weight


@contextlib.contextmanager
def _stops_the_run(job: Job) -> Iterator[None]:
    """A disk that fails during the run stops it, with its own exit status."""
    try:
        yield
    except MetricsError as error:
        raise StoppedError(f"the run stopped: {error}") from error
    except OSError as error:
        raise StoppedError(f"the run stopped: {job.folder.path} cannot be written: {error.strerror or error}") from error


# ---- after the last step


def _finish(job: Job, program: Program, outcome: Outcome) -> float:
    """The last validation, on all held-out tokens."""
    loss = validate(job, program, outcome.state, job.validation)
    with MetricsWriter(job.folder.metrics, append=True) as metrics:
        record = {"validation_loss": loss, "validation_tokens": job.validation.predicted, "bigram_loss": job.bigram}
        metrics.write({"step": outcome.steps, **record})
    return loss


def _conclude(job: Job, outcome: Outcome, loss: float | None) -> None:
    trained = (
        f"{outcome.steps} steps, {outcome.steps * job.settings.batch * job.config.context:,} tokens, {outcome.seconds:.0f} s of training"
    )
    if loss is None:
        name = "Ctrl-C" if outcome.signal == signal.SIGINT else "SIGTERM"
        print(
            f"stopped by {name} after {trained}; weights, metrics and plot are in {job.folder.path}, without a last validation", flush=True
        )
        return
    tokenizer = job.dataset.tokenizer
    prompt = [tokenizer.end] if tokenizer is not None else [int(job.dataset.validation[0])]
    params = job.ranks.full(outcome.state.params)
    if not job.ranks.leads:
        return
    text = sample(params, job.config, tokenizer, prompt, job.settings.seed, SAMPLE)
    difference = job.bigram - loss
    print(f"\na sample (functrain generate {job.folder.path} makes more):\n\n{text}\n")
    print(f"trained: {trained}")
    print(f"plot: {job.folder.plot}")
    print(
        f"validation loss: {loss:.4f} nats a token; interpolated bigram model: {job.bigram:.4f}; the model is {abs(difference):.4f} "
        f"{'below' if difference >= 0 else 'above'} it ({job.validation.predicted:,} tokens)",
        flush=True,
    )
