"""What torch's random operations mean when they draw from a key: one small function for each, in a table.

A handler gets a `Source`, which draws from one key, and the operation's arguments by name. Values of half precision are drawn in float32
and rounded, as torch's own generators do it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from functrain.kernels import integers_torch
from functrain.random import draws as draws
from functrain.random.keys import OPERATORS, fill

_aten = torch.ops.aten


# ---- which operations are random

# Tagged as random, but they draw nothing themselves.
_DRAW_NOTHING = {"_fused_sdp_choice", "_nested_tensor_softmax_with_shape", "_flash_attention_forward_no_dropout_inplace"}


def is_random(operation: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether a call of an operator draws from torch's generator.

    Operators that may draw (attention with dropout, dropout in training) are judged by these arguments; one that is not given counts as
    the schema's default.

    >>> is_random(torch.ops.aten.randn.default), is_random(torch.ops.aten.add.Tensor)
    (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    name = operation._schema.name.partition("::")[2]
    if name in _DRAW_NOTHING or name.endswith("_backward"):
        return False
    given = arguments(operation, args, kwargs or {})
    never = any(given.get(rate, 1) == 0 for rate in ("dropout_p", "dropout"))
    return not never and not any(given.get(flag, True) is False for flag in ("train", "training"))


def arguments(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the schema's defaults."""
    schema = operation._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    if isinstance(given.get("dtype"), int):  # torch's number for int64
        given["dtype"] = torch.int64
    given.update(zip((a.name for a in schema), args))
    return {**given, **kwargs}


# ---- drawing


@dataclasses.dataclass(frozen=True)
class Slices:
    """A `vmap` that a scope was entered in: its size, and whether the scope's key differs between its slices."""

    size: int
    has_keys: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """One draw: a key, and the enclosing vmaps whose slices the drawn tensor's first dimensions are, outermost first."""

    key: torch.Tensor  # [*sizes of the vmaps that have keys, 2]
    slices: tuple[Slices, ...]

    def uniform(self, shape: Any, dtype: torch.dtype, device: Any = None, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform values of a shape, in float64 or float32."""
        return self._draw(lambda key, size: fill(OPERATORS.threefry_uniform, key, size, dtype, low, high), shape, device)

    def normal(self, shape: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """Standard normal values of a shape, in float64 or float32."""
        return self._draw(lambda key, size: fill(OPERATORS.threefry_normal, key, size, dtype), shape, device)

    def bernoulli(self, shape: Any, p: float, device: Any = None) -> torch.Tensor:
        """Booleans of a shape."""
        return self._draw(lambda key, size: fill(OPERATORS.threefry_bernoulli, key, size, p), shape, device)

    def integers(self, shape: Any, low: int, high: int, device: Any = None) -> torch.Tensor:
        """int64 in [low, high)."""
        first, span = integers_torch.span_of(low, high, torch.int64)
        return self._draw(lambda key, size: fill(OPERATORS.threefry_integers, key, size, first, span, 64), shape, device)

    def only_key(self, what: str) -> torch.Tensor:
        """The key, for what cannot be drawn per slice of a vmap."""
        if self.slices:
            raise NotImplementedError(
                f"{what} inside `random.scope` inside vmap: draw it outside, or call functrain.random with the slice's key"
            )
        return self.key

    def _draw(self, draw: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor], shape: Any, device: Any) -> torch.Tensor:
        key = self.key if device is None else self.key.to(device)
        sizes = tuple(s.size for s in self.slices)
        shape = tuple(shape)
        if shape[: len(sizes)] != sizes:
            raise RuntimeError(
                f"a draw of shape {shape} inside `random.scope` lacks the dimensions {sizes} of the vmaps around it: use torch.vmap with "
                'randomness="different"'
            )
        values = draw(key, shape[len(sizes) :])
        if not sizes:
            return values
        lines = [s.size if s.has_keys else 1 for s in self.slices]
        return values.reshape([*lines, *shape[len(sizes) :]]).expand(shape).contiguous()


def _wide(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to draw in."""
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        raise NotImplementedError("complex random numbers inside `random.scope`: draw two real ones")
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- new tensors

Arguments = dict[str, Any]
Handler = Callable[[Source, Arguments], Any]


def _finish(values: torch.Tensor, a: Arguments, dtype: torch.dtype | None) -> torch.Tensor:
    """Drawn values as the tensor that a factory was asked for."""
    if a.get("layout") not in (None, torch.strided):
        raise NotImplementedError(f"random tensors of layout {a['layout']} inside `random.scope`")
    values = values.to(dtype or torch.get_default_dtype())
    return values.pin_memory() if a.get("pin_memory") else values


def _rand(source: Source, a: Arguments) -> torch.Tensor:
    return _finish(source.uniform(a["size"], _wide(a["dtype"]), a["device"]), a, a["dtype"])


def _randn(source: Source, a: Arguments) -> torch.Tensor:
    return _finish(source.normal(a["size"], _wide(a["dtype"]), a["device"]), a, a["dtype"])


def _randint(source: Source, a: Arguments) -> torch.Tensor:
    return _finish(source.integers(a["size"], a.get("low", 0), a["high"], a["device"]), a, a["dtype"])


def _normal_of_size(source: Source, a: Arguments) -> torch.Tensor:
    return _finish(source.normal(a["size"], _wide(a["dtype"]), a["device"]) * a["std"] + a["mean"], a, a["dtype"])


def _randperm(source: Source, a: Arguments) -> torch.Tensor:
    key = source.only_key("torch.randperm")
    return _finish(draws.permutation(key if a["device"] is None else key.to(a["device"]), a["n"]), a, a["dtype"] or torch.int64)


def _like(draw: Callable[[Source, Arguments, torch.dtype, Any], torch.Tensor]) -> Handler:
    """A handler for `*_like` of a function that draws (source, arguments, dtype, device)."""

    def handler(source: Source, a: Arguments) -> torch.Tensor:
        like = a["self"]
        dtype, device = a["dtype"] or like.dtype, a["device"] or like.device
        values = _finish(draw(source, a, dtype, device), a, dtype)
        if like.is_contiguous() and a["memory_format"] in (None, torch.preserve_format, torch.contiguous_format):
            return values
        return torch.empty_like(like, dtype=dtype, device=device, memory_format=a["memory_format"]).copy_(values)

    return handler


_rand_like = _like(lambda source, a, dtype, device: source.uniform(a["self"].shape, _wide(dtype), device))
_randn_like = _like(lambda source, a, dtype, device: source.normal(a["self"].shape, _wide(dtype), device))
_randint_like = _like(lambda source, a, dtype, device: source.integers(a["self"].shape, a.get("low", 0), a["high"], device))


# ---- values for a tensor that is there


def _uniform(source: Source, a: Arguments) -> torch.Tensor:
    x = a["self"]
    return source.uniform(x.shape, _wide(x.dtype), x.device, a["from"], a["to"])


def _normal(source: Source, a: Arguments) -> torch.Tensor:
    x = a["self"]
    return source.normal(x.shape, _wide(x.dtype), x.device) * a["std"] + a["mean"]


def _bernoulli_of_p(source: Source, a: Arguments) -> torch.Tensor:
    return source.bernoulli(a["self"].shape, a["p"], a["self"].device)


def _bernoulli_of_tensor(source: Source, a: Arguments) -> torch.Tensor:
    x, p = a["self"], a["p"] if "p" in a else a["self"]
    return source.uniform(x.shape, _wide(p.dtype), x.device) < p


def _exponential(source: Source, a: Arguments) -> torch.Tensor:
    x = a["self"]
    return torch.log1p(-source.uniform(x.shape, _wide(x.dtype), x.device)) * (-1 / a["lambd"])


def _log_normal(source: Source, a: Arguments) -> torch.Tensor:
    return torch.exp(_normal(source, a))


def _cauchy(source: Source, a: Arguments) -> torch.Tensor:
    x = a["self"]
    turns = source.uniform(x.shape, _wide(x.dtype), x.device) - 0.5
    return torch.tan(turns * math.pi) * a["sigma"] + a["median"]


def _geometric(source: Source, a: Arguments) -> torch.Tensor:
    x = a["self"]
    tries = torch.log1p(-source.uniform(x.shape, _wide(x.dtype), x.device)) / math.log1p(-a["p"])
    return torch.ceil(tries).clamp(min=1)


def _random(source: Source, a: Arguments) -> torch.Tensor:
    """Integers from `from` to `to` - 1; without bounds, all that the dtype holds exactly from 0 on."""
    x, low, high = a["self"], a.get("from", 0), a.get("to")
    if high is None:
        whole = x.dtype == torch.bool or not x.is_floating_point()
        high = (2 if x.dtype == torch.bool else torch.iinfo(x.dtype).max + 1) if whole else int(2 / torch.finfo(x.dtype).eps) + 1
    return source.integers(x.shape, low, high, x.device)


def _in_place(draw: Handler) -> Handler:
    return lambda source, a: a["self"].copy_(draw(source, a))


def _new(draw: Handler) -> Handler:
    return lambda source, a: draw(source, a).to(a["self"].dtype)


# ---- values that depend on tensors


def _normal_of_tensors(source: Source, a: Arguments) -> torch.Tensor:
    mean, std = a["mean"], a["std"]
    tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    dtype = torch.result_type(*tensors) if len(tensors) == 2 else tensors[0].dtype
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return (source.normal(shape, _wide(dtype), tensors[0].device) * std + mean).to(dtype)


def _multinomial(source: Source, a: Arguments) -> torch.Tensor:
    weights, count = a["self"], a["num_samples"]
    key = source.only_key("torch.multinomial").to(weights.device)
    logits = torch.log(weights.to(_wide(weights.dtype)))
    return draws.categorical(key, logits, shape=(count, *weights.shape[:-1]), replace=a["replacement"]).movedim(0, -1).contiguous()


def _native_dropout(source: Source, a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = a["input"], a["p"]
    mask = source.bernoulli(x.shape, 1 - p, x.device)
    return torch.where(mask, x * (1 / (1 - p) if p < 1 else 0.0), 0), mask


# ---- the table

_FILLS: dict[str, tuple[Handler, tuple[str, ...]]] = {
    # an operation, what it draws, its overloads in place; those that return a new tensor are called alike
    "uniform": (_uniform, ("default",)),
    "normal": (_normal, ("default",)),
    "exponential": (_exponential, ("default",)),
    "log_normal": (_log_normal, ("default",)),
    "cauchy": (_cauchy, ("default",)),
    "geometric": (_geometric, ("default",)),
    "random": (_random, ("default", "from", "to")),
}

HANDLERS: dict[Any, Handler] = {
    _aten.rand.default: _rand,
    _aten.rand.generator: _rand,
    _aten.randn.default: _randn,
    _aten.randn.generator: _randn,
    _aten.randint.default: _randint,
    _aten.randint.generator: _randint,
    _aten.randint.low: _randint,
    _aten.randint.low_generator: _randint,
    _aten.randperm.default: _randperm,
    _aten.randperm.generator: _randperm,
    _aten.rand_like.default: _rand_like,
    _aten.randn_like.default: _randn_like,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
    _aten.normal.float_float: _normal_of_size,
    _aten.normal.Tensor_float: _normal_of_tensors,
    _aten.normal.float_Tensor: _normal_of_tensors,
    _aten.normal.Tensor_Tensor: _normal_of_tensors,
    _aten.normal_functional.default: _new(_normal),
    _aten.bernoulli.default: _new(_bernoulli_of_tensor),
    _aten.bernoulli.p: _new(_bernoulli_of_p),
    _aten.bernoulli.Tensor: _new(_bernoulli_of_tensor),
    _aten.bernoulli_.float: _in_place(_bernoulli_of_p),
    _aten.bernoulli_.Tensor: _in_place(_bernoulli_of_tensor),
    _aten.native_dropout.default: _native_dropout,
    _aten.multinomial.default: _multinomial,
}
for _name, (_draw, _overloads) in _FILLS.items():
    for _overload in _overloads:
        HANDLERS[getattr(getattr(_aten, _name + "_"), _overload)] = _in_place(_draw)
        if _name != "normal":  # normal_functional
            HANDLERS[getattr(getattr(_aten, _name), _overload)] = _new(_draw)
