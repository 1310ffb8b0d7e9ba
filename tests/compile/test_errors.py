"""What a graph cannot hold is refused, with the user's line and what to do instead."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import functrain as ft
from functrain.compile import errors

HERE = re.escape("compile/test_errors.py")


def refused(function: Any, *args: Any, error: type[Exception], says: str, **options: Any) -> str:
    with pytest.raises(error, match=says) as caught:
        ft.jit(function, **options)(*args)
    return str(caught.value)


def line_of(function: Any, offset: int) -> str:
    return f"test_errors.py:{function.__code__.co_firstlineno + offset}"


def test_a_branch_on_a_traced_value() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    text = refused(function, torch.ones(3), error=errors.DataDependentError, says=r"torch\.where")
    assert line_of(function, 1) in text


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: float(x[0]), lambda x: x.tolist(), lambda x: int(x.argmax())])
def test_reading_a_value(read: Any) -> None:
    refused(lambda x: x * read(x), torch.ones(3), error=errors.DataDependentError, says="needs the value of a traced tensor")


def test_a_shape_that_depends_on_values() -> None:
    text = refused(lambda x: x[x > 0], torch.ones(3), error=errors.DataDependentError, says="mask of fixed shape")
    assert re.search(HERE, text)


def test_changing_an_argument_in_place() -> None:
    def function(state: Any) -> Any:
        state["w"].add_(1)
        return state

    text = refused(function, {"w": torch.ones(3)}, error=errors.MutationError, says="changes state/w in place")
    assert line_of(function, 1) in text


def test_changing_an_argument_through_a_view() -> None:
    refused(lambda x: x.view(-1)[:2].zero_(), torch.ones(3), error=errors.MutationError, says="changes x in place")


def test_changing_a_tensor_from_outside() -> None:
    total = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total

    text = refused(function, torch.ones(3), error=errors.MutationError, says="outside the function")
    assert line_of(function, 1) in text
    assert float(total.sum()) == 0


counter = 0


def test_writing_a_global() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        global counter
        counter += 1
        return x * counter

    text = refused(function, torch.ones(3), error=errors.ImpureError, says="`counter` is changed by the function itself")
    assert line_of(function, 2) in text


scale = 2.0


def test_a_changed_global_is_noticed() -> None:
    global scale

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    step = ft.jit(function)
    assert float(step(torch.tensor(1.0))) == 2.0
    scale = 3.0
    with pytest.raises(errors.ImpureError, match=r"global `scale` held 2\.0 .* holds 3\.0 now.*static_argnames") as caught:
        step(torch.tensor(1.0))
    assert line_of(function, 1) in str(caught.value)
    scale = 2.0
    assert float(step(torch.tensor(1.0))) == 2.0


@dataclass
class Settings:
    rate: float = 0.5


def test_a_changed_closure_is_noticed() -> None:
    settings, factor, history = Settings(), torch.ones(2), [1]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * settings.rate * factor * len(history)

    step = ft.jit(lambda x: inner(x))
    step(torch.ones(2))
    settings.rate = 0.7
    with pytest.raises(errors.ImpureError, match="settings"):
        step(torch.ones(2))
    settings.rate = 0.5
    step(torch.ones(2))
    factor.mul_(2)
    with pytest.raises(errors.ImpureError, match="factor"):
        step(torch.ones(2))


def test_a_list_that_collects_traced_tensors() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x * 2)
        return x

    refused(function, torch.ones(2), error=errors.ImpureError, says="`seen` is changed by the function itself")


def test_global_randomness() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3)

    text = refused(function, torch.ones(3), error=errors.RandomnessError, says=r"random\.scope\(key\)")
    assert line_of(function, 1) in text
    refused(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(3), error=errors.RandomnessError, says="key")


def test_keyed_randomness_is_fine() -> None:
    def function(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with ft.random.scope(key):
            return torch.nn.functional.dropout(x, 0.5)

    key, x = ft.random.key(3), torch.ones(64)
    assert torch.equal(ft.jit(function)(x, key), function(x, key))
    assert not torch.equal(ft.jit(function)(x, ft.random.key(4)), function(x, key))


def test_leaves_of_other_types() -> None:
    refused(lambda x, mode: x, torch.ones(2), "fast", error=errors.LeafError, says="static_argnames")
    refused(lambda x: object(), torch.ones(2), error=errors.LeafError, says="returns object")


def test_static_arguments_must_be_hashable() -> None:
    refused(lambda x, mode: x, torch.ones(2), [1], error=errors.CaptureError, says="not hashable", static_argnames="mode")
    refused(lambda x, mode: x, torch.ones(2), torch.ones(1), error=errors.CaptureError, says="is a tensor", static_argnames="mode")


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="'sate' is no argument"):
        ft.jit(lambda state: state, donate="sate")
    with pytest.raises(ValueError, match="backend 'tpu' is unknown"):
        ft.jit(lambda x: x, backend="tpu")
    with pytest.raises(NotImplementedError, match="memory"):
        ft.jit(lambda x: x, memory=1)


def test_a_tensor_that_leaked_from_another_capture() -> None:
    kept: dict[str, Any] = {}

    class Holder:
        pass

    holder = Holder()

    def leaks(x: torch.Tensor) -> torch.Tensor:
        holder.value = x * 2
        return x

    ft.jit(leaks)(torch.ones(2))
    kept["value"] = holder.value
    refused(lambda x: x + holder.value, torch.ones(2), error=errors.CaptureError, says="another capture")


def test_errors_of_the_running_graph_name_the_line() -> None:
    def function(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, table)

    with pytest.raises(IndexError) as caught:
        ft.jit(function)(torch.ones(3, 2), torch.tensor([5]))
    assert line_of(function, 1) in "".join(caught.value.__notes__)


def test_an_exception_of_the_users_own_passes_through() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ft.jit(function)(torch.ones(1))
