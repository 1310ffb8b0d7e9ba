"""What `functrain` runs: a command, and what becomes of its errors."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

import torch

from functrain.cli.arguments import parse
from functrain.cli.errors import StoppedError, UsageError
from functrain.cli.generate import generate_command
from functrain.cli.train import train_command
from functrain.data.errors import DataError
from functrain.observe import set_log_level

COMMANDS = {"train": train_command, "generate": generate_command}
BAD_INPUT, STOPPED, UNEXPECTED, INTERRUPTED = 2, 3, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, 2 for bad input, 3 for a run that had to stop, 130 after Ctrl-C.

    Args:
        argv: words after the program's name; None for `sys.argv`.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        with _quiet(debug):
            arguments = parse(argv)
            set_log_level(arguments.log_level)
            return COMMANDS[arguments.command](arguments)
    except SystemExit as stop:  # the help was printed
        return int(stop.code or 0)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, debug)
    except (UsageError, DataError) as error:
        return _fail(str(error), BAD_INPUT, debug)
    except StoppedError as error:
        return _fail(str(error), STOPPED, debug)
    except torch.OutOfMemoryError:
        return _fail("the device is out of memory: lower --batch, raise --microbatches, or give --remat", STOPPED, debug)
    except Exception as error:
        return _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", UNEXPECTED, debug)


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"functrain: {' '.join(message.split())}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Without warnings, unless they are asked for."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        yield
