"""The folder of a run: weights, configuration, tokenizer, metrics, plot. Each file is whole or not there."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import functrain.random as random
from functrain import tree
from functrain.cli.errors import UsageError
from functrain.compile.abstract import eval_shape
from functrain.data.tokenizer import Tokenizer, load_tokenizer
from functrain.models import gpt
from functrain.observe import plot_loss
from functrain.tree import PyTree


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files, and how to write and read them."""

    path: Path

    @property
    def config(self) -> Path:
        """Architecture and settings, JSON."""
        return self.path / "config.json"

    @property
    def weights(self) -> Path:
        """Params by path, safetensors."""
        return self.path / "weights.safetensors"

    @property
    def tokenizer(self) -> Path:
        """What `functrain.data.load_tokenizer` reads; missing where the data had none."""
        return self.path / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step or validation."""
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        """The loss over steps."""
        return self.path / "loss.png"

    # ---- writing

    def check(self) -> None:
        """Raise UsageError unless the folder is new, empty, or an earlier run's, whose files will be replaced."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give a folder with --out")
        try:
            taken = self.path.is_dir() and any(self.path.iterdir()) and not self.config.is_file()
        except OSError as error:
            raise UsageError(f"the run folder {self.path} cannot be read: {error.strerror}") from None
        if taken:
            raise UsageError(f"the folder {self.path} holds other files and no run; give another with --out")

    def start(self, config: gpt.Config, about: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Make the folder with its configuration and tokenizer; an earlier run's weights and plot go."""
        self.check()
        text = json.dumps({"model": dataclasses.asdict(config), **about}, indent=2, default=str) + "\n"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for old in (self.weights, self.plot, self.tokenizer):
                old.unlink(missing_ok=True)
            write_whole(self.config, lambda path: path.write_text(text, encoding="utf-8"))
            if tokenizer is not None:
                write_whole(self.tokenizer, lambda path: path.write_text(tokenizer.to_json(), encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the run folder {self.path} cannot be written: {error.strerror}") from None

    def save_weights(self, params: PyTree, step: int) -> None:
        """Write params on the CPU, in their dtype."""
        from safetensors.torch import save_file  # noqa: PLC0415  (needed when a run saves)

        flat = {path: leaf.detach().cpu().contiguous() for path, leaf in tree.leaves_with_path(params)}
        write_whole(self.weights, lambda path: save_file(flat, path, metadata={"step": str(step)}))

    def save_plot(self, records: Sequence[dict[str, Any]], baseline: float) -> None:
        """Draw the loss."""
        write_whole(self.plot, lambda path: plot_loss(records, path, baseline=baseline))

    # ---- reading

    def load(self) -> tuple[PyTree, gpt.Config, Tokenizer | None]:
        """Params, architecture and tokenizer.

        Raises:
            UsageError: the folder holds no run, no weights yet, or damaged ones.
            DataError: the tokenizer is damaged.
        """
        if not self.config.is_file():
            raise UsageError(f"{self.path} is no run folder: it has no {self.config.name}")
        try:
            config = gpt.Config(**json.loads(self.config.read_text(encoding="utf-8"))["model"])
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise UsageError(f"{self.config} describes no model: {error}") from None
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer.is_file() else None
        return self._load_weights(config), config, tokenizer

    def _load_weights(self, config: gpt.Config) -> PyTree:
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415

        if not self.weights.is_file():
            raise UsageError(f"{self.path} has no weights yet: they are written at the first validation and at the end")
        try:
            flat = load_file(self.weights)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{self.weights} is damaged: {error}") from None
        like = eval_shape(lambda key: gpt.init(config, key), random.key(0))
        expected = {path: list(leaf.shape) for path, leaf in tree.leaves_with_path(like)}
        for path in sorted(expected.keys() | flat.keys()):
            found = list(flat[path].shape) if path in flat else None
            if found != expected.get(path):
                raise UsageError(f"{self.weights} does not fit {self.config.name}: {path} is {found}, and should be {expected.get(path)}")
        return tree.unflatten(tree.structure(like), [flat[path] for path in tree.paths(like)])


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, put it on the disk, and rename it: there is never half of it.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(scratch, write)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Errors of writers that wrap the system's in their own come out as OSError."""
    try:
        write(path)
    except OSError:
        raise
    except Exception as error:
        if "os error" in str(error):  # safetensors: "I/O error: No space left on device (os error 28)"
            number = int(str(error).split("os error")[1].strip(" )"))
            raise OSError(number, os.strerror(number)) from None
        raise
