"""The options of each command. A mistake is a `UsageError` that names the nearest right word."""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from functrain.cli.errors import UsageError
from functrain.cli.settings import BACKENDS, DEVICES, OPTIMIZERS, PRECISIONS, TOKENIZERS, TrainSettings
from functrain.models.gpt import SIZES

COMMANDS = ("train", "generate")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; `command` says which.

    Raises:
        UsageError: a word that is not understood.
        SystemExit: the help was asked for, and is printed.
    """
    parser = _Parser("functrain", description="Functional training on PyTorch.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,generate}")
    options = {"train": _add_train(commands), "generate": _add_generate(commands)}
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}{_nearest(command, COMMANDS)}")
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown(unknown[0], options[found.command]))
    return found


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; `{parser.prog} --help` lists what there is"
    return f"unknown option {word.split('=', maxsplit=1)[0]}{_nearest(word.split('=', maxsplit=1)[0], known)}"


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _add_train(commands: "argparse._SubParsersAction[_Parser]") -> _Parser:
    about = "Train a GPT on text. The run folder holds weights, configuration, tokenizer, metrics and a plot of the loss."
    parser = commands.add_parser("train", help="train a GPT on text", description=about, epilog=_STATUS, allow_abbrev=False)
    default = TrainSettings()
    add = parser.add_argument
    model = parser.add_argument_group("model and data").add_argument
    model("--model", type=_one_of("model", SIZES), default=default.model, help=f"{', '.join(SIZES)} (default %(default)s)")
    model("--data", metavar="PATH", help="a text file, folder, .jsonl, or token file (.bin, .npy); default: Python's standard library")
    model("--field", default=default.field, help="which field of a JSON line holds the text (default %(default)s)")
    model("--tokenizer", type=_one_of("tokenizer", TOKENIZERS), default=default.tokenizer, help="bpe or bytes (default %(default)s)")
    model("--vocab", type=_whole(1), metavar="N", help="token ids of the BPE (default: by model)")
    model("--held-out", type=_real(0, 1), default=default.held_out, metavar="X", help="fraction for validation (default %(default)s)")
    model("--seq", type=_whole(1), metavar="N", help="tokens in a row (default: the model's context)")
    model("--dropout", type=_real(0, 1), default=default.dropout, metavar="X", help="rate (default %(default)s)")

    training = parser.add_argument_group("training").add_argument
    training("--steps", type=_whole(1), default=default.steps, metavar="N", help="(default %(default)s)")
    training("--minutes", type=_real(0), metavar="M", help="stop after so many minutes of training, if steps remain")
    training("--batch", type=_whole(1), default=default.batch, metavar="N", help="rows in a batch (default %(default)s)")
    training("--microbatches", type=_whole(1), default=default.microbatches, metavar="N", help="parts of a batch (default %(default)s)")
    training(
        "--optimizer",
        type=_one_of("optimizer", OPTIMIZERS),
        default=default.optimizer,
        help=f"{', '.join(OPTIMIZERS)} (default %(default)s)",
    )
    training("--lr", type=_real(0), metavar="X", help="peak learning rate (default: by optimizer)")
    training("--warmup", type=_whole(0), default=default.warmup, metavar="N", help="steps (default %(default)s)")
    training("--weight-decay", type=_real(0), default=default.weight_decay, metavar="X", help="(default %(default)s)")
    training("--clip", type=_real(0), default=default.clip, metavar="X", help="largest norm of the gradients (default %(default)s)")
    training(
        "--seed", type=_whole(0), default=default.seed, metavar="N", help="of init, shuffling, dropout and sample (default %(default)s)"
    )

    running = parser.add_argument_group("running").add_argument
    running("--precision", type=_one_of("precision", PRECISIONS), default=default.precision, help="fp32 or bf16 (default %(default)s)")
    running("--backend", type=_one_of("backend", BACKENDS), default=default.backend, help="auto, eager or inductor (default %(default)s)")
    running("--device", type=_one_of("device", DEVICES), default=default.device, help="auto, cpu or cuda (default %(default)s)")
    running("--nproc", type=_whole(1), metavar="N", help="ranks to start on this machine (default: those of the plan, or 1)")
    running("--plan", metavar="FILE", help="where the state lives, as TOML (default with several ranks: ZeRO-3 over all)")
    running("--remat", action="store_true", help="keep less for the backward pass and compute it again")
    running("--eval-every", type=_whole(1), default=default.eval_every, metavar="N", help="steps between validations (default %(default)s)")
    running("--out", metavar="FOLDER", help="the run folder (default: runs/MODEL-DATE-TIME)")
    _add_common(add)
    return parser


def _add_generate(commands: "argparse._SubParsersAction[_Parser]") -> _Parser:
    parser = commands.add_parser(
        "generate", help="sample from a run", description="Sample text from a run.", epilog=_STATUS, allow_abbrev=False
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder")
    add("--prompt", default="", help="text to continue; token ids where the run has no tokenizer (default: the start of a document)")
    add("--tokens", type=_whole(1), default=200, metavar="N", help="(default %(default)s)")
    add("--temperature", type=_real(0), default=0.8, metavar="X", help="0 takes the likeliest token each time (default %(default)s)")
    add("--top-k", type=_whole(1), metavar="N", help="draw among the N likeliest tokens only")
    add("--seed", type=_whole(0), default=0, metavar="N", help="of the key (default %(default)s)")
    _add_common(add)
    return parser


_STATUS = "Exit status: 0 done; 2 bad input; 3 a run that had to stop; 130 stopped by Ctrl-C, with what was reached saved."


def _add_common(add: Callable[..., argparse.Action]) -> None:
    add("--log-level", type=_one_of("log level", ("debug", "info", "warning", "error")), default="warning", help="(default %(default)s)")
    add("--debug", action="store_true", help="show Python's traceback of an error, and warnings")


def _one_of(what: str, known: Iterable[str]) -> Callable[[str], str]:
    words = list(known)

    def convert(word: str) -> str:
        if word not in words:
            raise argparse.ArgumentTypeError(f"unknown {what} {word!r}{_nearest(word, words)}")
        return word

    return convert


def _whole(least: int) -> Callable[[str], int]:
    def convert(word: str) -> int:
        try:
            number = int(word.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small; it is at least {least}")
        return number

    return convert


def _real(least: float, below: float = math.inf) -> Callable[[str], float]:
    def convert(word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None
        if not least <= number < below:
            bound = f"at least {least:g}" + (f" and below {below:g}" if below < math.inf else "")
            raise argparse.ArgumentTypeError(f"{word} is out of range; it is {bound}")
        return number

    return convert
