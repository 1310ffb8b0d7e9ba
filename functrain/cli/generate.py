"""`functrain generate`: sample from a run folder."""

import argparse
import unicodedata
from pathlib import Path

import torch

import functrain.random as random
from functrain.cli.errors import UsageError, as_usage
from functrain.cli.run_folder import RunFolder
from functrain.data.tokenizer import Tokenizer
from functrain.models.generate import generate
from functrain.models.gpt import Config
from functrain.tree import PyTree


def generate_command(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    params, config, tokenizer = RunFolder(Path(arguments.run)).load()
    prompt = read_prompt(arguments.prompt, tokenizer)
    with as_usage():
        text = sample(params, config, tokenizer, prompt, arguments.seed, arguments.tokens, arguments.temperature, arguments.top_k)
    print(text)
    return 0


def read_prompt(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt; an empty one is the start of a document.

    Raises:
        UsageError: the run has no tokenizer, and the prompt is not numbers.
    """
    if tokenizer is not None:
        return tokenizer.encode_batch([text])[0].tolist() or [tokenizer.end]
    try:
        return [int(word) for word in text.split()] or [0]
    except ValueError:
        raise UsageError(
            "this run was trained on token ids without a tokenizer: give the prompt as ids, such as --prompt '12 7 3'"
        ) from None


def sample(
    params: PyTree,
    config: Config,
    tokenizer: Tokenizer | None,
    prompt: list[int],
    seed: int,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
) -> str:
    """A prompt and its continuation as text; token ids where there is no tokenizer."""
    device = params["embed"].device
    start = torch.tensor([prompt], device=device)
    key = random.key(seed, device=device)
    added = generate(params, start, config, key=key, tokens=tokens, temperature=temperature, top_k=top_k)
    ids = [*prompt, *added[0].tolist()]
    if tokenizer is None:
        return " ".join(map(str, ids))
    return printable(tokenizer.decode(ids[1:] if prompt == [tokenizer.end] else ids))


def printable(text: str) -> str:
    """Text that leaves a terminal as it was: control characters but tab and newline become U+FFFD.

    >>> printable("a\\tb\\x1b[2J")
    'a\\tb\ufffd[2J'
    """
    return "".join(c if c in "\t\n" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
