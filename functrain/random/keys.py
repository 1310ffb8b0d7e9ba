"""Keys, and the one place where draws start."""

import math
import operator
from collections.abc import Callable, Sequence

import torch

import functrain.kernels.threefry  # noqa: F401  (registers the operators)

Shape = Sequence[int]

OPERATORS = torch.ops.functrain
WORD = 0xFFFFFFFF


# ---- keys


def key(seed: int | torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """A key made of a seed.

    Args:
        seed: an integer of 64 bits, or such a scalar tensor (it may be traced). JAX takes 32 bits of it unless x64 is enabled; below 2**32
            both agree.
        device: where the key and all that is drawn from it live; a tensor's own device by default.

    Returns:
        An int64 tensor `[2]`.

    Raises:
        ValueError: the seed has more than 64 bits, or is not a scalar.

    >>> key(7)
    tensor([0, 7])
    """
    if isinstance(seed, torch.Tensor):
        if seed.shape or seed.is_floating_point():
            raise ValueError(f"a seed is a scalar integer, not {describe(seed)}; use torch.vmap for many")
        words = seed.to(device=device or seed.device, dtype=torch.int64)
        return torch.stack([(words >> 32) & WORD, words & WORD])
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed has 64 bits, {seed} has more")
    return torch.tensor([(seed >> 32) & WORD, seed & WORD], dtype=torch.int64, device=device)


def split(key: torch.Tensor, n: int | Shape = 2) -> torch.Tensor:
    """New, independent keys made of one.

    Args:
        key: `[2]`; not to be used for anything else afterwards.
        n: how many, or a shape of keys.

    Returns:
        `[n, 2]`, or `[*n, 2]`.

    >>> first, second = split(key(0))
    """
    check_key("split", key)
    shape = as_shape(n)
    counts = torch.arange(math.prod(shape), device=key.device)
    return OPERATORS.threefry_fold_in(key, counts if len(shape) == 1 else counts.reshape(shape))


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """A new key made of a key and a number: a step, a layer, a rank.

    Args:
        key: `[2]`.
        data: an integer of 32 bits, or a scalar integer tensor (it may be traced), of which the low 32 bits count.

    Returns:
        `[2]`.

    Raises:
        ValueError: `data` does not fit in 32 bits, or is not a scalar.

    >>> fold_in(key(0), 1)
    tensor([ 928981903, 3453687069])
    """
    check_key("fold_in", key)
    if isinstance(data, torch.Tensor):
        if data.shape or data.is_floating_point():
            raise ValueError(f"fold_in takes a scalar integer, not {describe(data)}; use torch.vmap for many")
        return OPERATORS.threefry_fold_in(key, data.to(device=key.device, dtype=torch.int64) & WORD)
    if not 0 <= data <= WORD:
        raise ValueError(f"fold_in takes a number in [0, 2**32), not {data}")
    return OPERATORS.threefry_fold_in(key, torch.full((), data, dtype=torch.int64, device=key.device))


# ---- where draws start, and checks


def fill(operator: Callable[..., torch.Tensor], key: torch.Tensor, shape: Shape, *rest: object) -> torch.Tensor:
    """A whole draw: of a shape, the window that is the shape. Keys `[*batch, 2]` give `[*batch, *shape]`."""
    return operator(key, shape, [0] * len(shape), shape, *rest)


def check_key(name: str, key: torch.Tensor) -> None:
    """Raise TypeError for what is not a key, ValueError for several; `name` is the function that wants it."""
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int64 or key.shape[-1:] != (2,):
        raise TypeError(f"{name} takes a key, an int64 tensor [2] as functrain.random.key makes it, not {describe(key)}")
    if key.ndim != 1:
        raise ValueError(f"{name} takes one key [2], not keys {list(key.shape)}; use torch.vmap over them, or choose one")


def as_shape(shape: int | Shape) -> tuple[int, ...]:
    """A shape as a tuple; one number is a shape of one dimension."""
    if isinstance(shape, int):
        return (shape,)
    return tuple(n if isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in shape)


def describe(x: object) -> str:
    """A value in an error message."""
    return f"a {x.dtype} tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r}"
