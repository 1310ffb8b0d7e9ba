"""Derivatives and batching mean what JAX means by them, in any nesting."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functrain import tree
from functrain.torch_internals import current_annotation
from functrain.transforms import grad, jvp, value_and_grad, vjp, vmap
from tests.helpers import assert_same_structure, assert_trees_close, assert_trees_equal

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Here(NamedTuple):
    """One array library with its transforms, so that one text runs in both."""

    np: Any
    grad: Any
    value_and_grad: Any
    vjp: Any
    jvp: Any
    vmap: Any
    array: Callable[[Any], Any]


OURS = Here(torch, grad, value_and_grad, vjp, jvp, vmap, lambda x: torch.as_tensor(np.array(x)))
JAX = Here(jnp, jax.grad, jax.value_and_grad, jax.vjp, jax.jvp, jax.vmap, jnp.asarray)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def both(text: Callable[[Here], Any], **tolerance: Any) -> None:
    """One text gives the same trees in both libraries, and none of ours is attached to a graph."""
    ours, theirs = text(OURS), text(JAX)
    assert_trees_close(ours, theirs, **(tolerance or TIGHT))
    assert not any(x.requires_grad for x in tree.tensors(ours))


@tree.struct
class Layer:
    w: Any
    b: Any
    name: str = tree.field(static=True, default="layer")


def network(here: Here, params: Any, x: Any) -> Any:
    hidden = here.np.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return (hidden @ params["out"]).sum()


def weights(here: Here) -> Any:
    return {"in": {"w": here.array(normal(0, 3, 4)), "b": here.array(normal(1, 4))}, "out": here.array(normal(2, 4, 2))}


# ---- value_and_grad and grad as JAX has them


def test_value_and_gradient_of_a_network_equal_jax() -> None:
    both(lambda h: h.value_and_grad(lambda p, x: network(h, p, x))(weights(h), h.array(normal(3, 5, 3))))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (0, 2)])
def test_argnums_choose_arguments_as_in_jax(argnums: Any) -> None:
    def loss(x: Any, y: Any, z: Any) -> Any:
        return (x * y**2 * z["z"] ** 3).sum()

    both(lambda h: h.value_and_grad(loss, argnums=argnums)(h.array([1.0, 2.0]), h.array([3.0, 4.0]), {"z": h.array([0.5, 0.7])}))


def test_aux_is_passed_through_and_detached() -> None:
    both(lambda h: h.value_and_grad(lambda x: ((x**2).sum(), {"double": 2 * x, "none": None}), has_aux=True)(h.array([1.0, 2.0])))
    both(lambda h: h.grad(lambda x: ((x**2).sum(), (x,)), has_aux=True)(h.array([1.0, 2.0])))


def test_aux_may_hold_anything() -> None:
    _, aux = grad(lambda x: (x**2, {"text": "a", "n": 3, "x": x}), has_aux=True)(torch.tensor(2.0))
    assert aux["text"] == "a"
    assert aux["n"] == 3
    _, aux = vmap(grad(lambda x: (x**2, {"n": 3, "x": x}), has_aux=True))(torch.ones(2))
    assert_trees_equal(aux, {"n": torch.tensor([3, 3]), "x": torch.ones(2)})


def test_unused_params_get_zeros() -> None:
    both(lambda h: h.grad(lambda p: p["a"].sum())({"a": h.array([1.0]), "unused": h.array(normal(0, 2, 3))}))
    both(lambda h: h.value_and_grad(lambda p: h.array(1.5))({"a": h.array([1.0])}))


def test_integer_leaves_are_passed_on_and_get_zeros_of_their_dtype() -> None:
    params = {"table": torch.arange(6.0).reshape(3, 2), "index": torch.tensor([0, 2]), "mask": torch.tensor([True, False]), "n": 2}
    gradients = grad(lambda p: (p["table"][p["index"]] * p["mask"]).sum() * p["n"])(params)
    expected = {
        "table": torch.tensor([[2.0, 0], [0, 0], [2, 0]]),
        "index": torch.zeros(2, dtype=torch.int64),
        "mask": torch.zeros(2, dtype=torch.bool),
        "n": 0,
    }
    assert_trees_equal(gradients, expected)
    assert_same_structure(gradients, params)


def test_numbers_and_numpy_arrays_are_arrays() -> None:
    both(lambda h: h.value_and_grad(lambda p: (p["x"] * p["y"]).sum())({"x": 2.0, "y": normal(0, 3)}), rtol=1e-6, atol=1e-6)


def test_structs_come_back_as_structs() -> None:
    layer = Layer(w=torch.ones(2, 2), b=torch.zeros(2), name="first")
    gradients = grad(lambda p, x: (x @ p.w + p.b).sum())(layer, torch.ones(1, 2))
    assert isinstance(gradients, Layer)
    assert gradients.name == "first"
    assert_trees_equal(gradients, Layer(w=torch.ones(2, 2), b=torch.ones(2), name="first"))


def test_one_tensor_at_two_paths_has_two_gradients() -> None:
    def text(h: Here) -> Any:
        w = h.array([1.0, 2.0])
        return h.grad(lambda p: (p["a"] ** 2 + 3 * p["b"]).sum())({"a": w, "b": w})

    both(text)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_gradient_has_the_dtype_of_its_leaf(dtype: torch.dtype) -> None:
    value, gradient = value_and_grad(lambda x: (x.float() ** 2).sum())(torch.ones(3, dtype=dtype))
    assert gradient.dtype is dtype
    assert value.dtype is torch.float32


def test_complex_leaves_follow_jax() -> None:
    z = normal(0, 3) + 1j * normal(1, 3)
    both(lambda h: h.grad(lambda p: (h.np.real(p) ** 2 + 3 * h.np.imag(p) * h.np.real(p)).sum())(h.array(z)))
    both(lambda h: h.vjp(lambda p: p**2 * (1 + 2j), h.array(z))[1](h.array(normal(2, 3) + 1j * normal(3, 3))))
    both(lambda h: h.jvp(lambda p: p**2 * (1 + 2j), (h.array(z),), (h.array(normal(2, 3) + 1j),)))


def test_infinities_and_nans_flow_as_in_jax() -> None:
    both(lambda h: h.value_and_grad(lambda x: h.np.log(x).sum())(h.array([0.0, 1.0])))
    both(lambda h: h.value_and_grad(lambda x: h.np.sqrt(x - 1).sum())(h.array([0.0, 2.0])))


def test_inputs_that_require_gradients_are_left_alone() -> None:
    module = torch.nn.Linear(2, 1)
    params = dict(module.named_parameters())
    value, gradients = value_and_grad(lambda p, x: torch.func.functional_call(module, p, x).sum())(params, torch.ones(1, 2))
    assert not value.requires_grad
    assert_trees_equal(gradients, {"bias": torch.ones(1), "weight": torch.ones(1, 2)})
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_autograd_is_off(mode: Any) -> None:
    x = torch.tensor(3.0)
    with mode():
        assert grad(lambda x, *, power: x**power)(x, power=2) == 6.0
        assert grad(grad(lambda x: x**3))(x) == 18.0
        assert vjp(lambda x: x**2, x)[1](torch.tensor(1.0)) == (6.0,)


def test_phases_are_tagged() -> None:
    seen = {}

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["forward"] = current_annotation().get("phase")
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen["backward"] = current_annotation().get("phase")
            return g * 2

    grad(lambda x: Probe.apply(x))(1.0)
    assert seen == {"forward": "forward", "backward": "backward"}
    grad(lambda x: x * grad(lambda y: Probe.apply(y))(1.0))(1.0)
    assert seen == {"forward": "forward", "backward": "forward"}, "an inner backward is part of the outer forward"
    assert "phase" not in current_annotation()


# ---- Mean


def test_a_mean_is_divided_and_differentiated() -> None:
    mask = torch.tensor([1.0, 0, 1, 1])
    loss = lambda p, x: tree.Mean((p * x * mask).sum(), mask.sum())  # noqa: E731
    x = torch.arange(4.0)
    value, gradient = value_and_grad(loss)(torch.ones(4), x)
    assert_trees_close((value, gradient), (torch.tensor(5 / 3), x * mask / 3))


@pytest.mark.parametrize("weight", [torch.tensor(0.0), torch.tensor(0)])
def test_a_mean_of_nothing_is_zero_with_zero_gradients(weight: torch.Tensor) -> None:
    value, gradient = value_and_grad(lambda p: tree.Mean((p**2).sum(), weight))(torch.ones(3))
    assert_trees_equal((value, gradient), (torch.tensor(0.0), torch.zeros(3)))


def test_a_weight_that_depends_on_params_is_differentiated_too() -> None:
    both(
        lambda h: h.value_and_grad(lambda p: tree.Mean((p**2).sum(), p.sum()) if h is OURS else (p**2).sum() / p.sum())(h.array([1.0, 2.0]))
    )


# ---- nesting


def gradient_by_cotangent(h: Here, pull: Any) -> Any:
    return h.grad(lambda c: (pull(c)[0] ** 2).sum())(h.array([1.0, 2.0]))


NESTED: dict[str, Callable[[Here], Any]] = {
    "grad of grad": lambda h: h.grad(h.grad(lambda x: h.np.sin(x) * x**3))(h.array(0.7)),
    "third derivative": lambda h: h.grad(h.grad(h.grad(lambda x: h.np.sin(x) * x**3)))(h.array(0.7)),
    "gradient penalty": lambda h: h.value_and_grad(lambda p, x: (h.grad(lambda x: network(h, p, x))(x) ** 2).sum() + network(h, p, x))(
        weights(h), h.array(normal(3, 5, 3))
    ),
    "inner gradient closes over outer params": lambda h: h.grad(
        lambda w: (h.grad(lambda x: (h.np.sin(w * x)).sum())(h.array([1.0, 2.0])) * w).sum()
    )(h.array([0.3, 0.4])),
    "inner value depends on outer params": lambda h: h.grad(lambda w: h.value_and_grad(lambda x: (w * x**2).sum())(w * 2)[0])(
        h.array([0.3, 0.4])
    ),
    "no confusion of perturbations": lambda h: h.grad(lambda x: x * h.grad(lambda y: x + y)(x))(h.array(2.0)),
    "aux of an inner gradient": lambda h: h.grad(lambda w: h.grad(lambda x: ((x * w).sum(), (x * w**2).sum()), has_aux=True)(w)[1])(
        h.array([0.3, 0.4])
    ),
    "vmap of grad": lambda h: h.vmap(h.grad(lambda p, x: network(h, p, x)), in_axes=(None, 0))(weights(h), h.array(normal(3, 5, 3))),
    "vmap of value_and_grad with aux": lambda h: h.vmap(h.value_and_grad(lambda x: ((x**2).sum(), {"x": x}), has_aux=True))(
        h.array(normal(3, 5, 3))
    ),
    "vmap of grad of grad": lambda h: h.vmap(h.grad(h.grad(lambda x: h.np.sin(x) * x)))(h.array(normal(3, 5))),
    "grad of vmap": lambda h: h.grad(lambda p, x: h.vmap(lambda x: network(h, p, x))(x).sum())(weights(h), h.array(normal(3, 5, 3))),
    "grad of vmap of grad": lambda h: h.grad(lambda p, x: (h.vmap(h.grad(lambda x: network(h, p, x)))(x) ** 2).sum())(
        weights(h), h.array(normal(3, 5, 3))
    ),
    "vmap of grad of vmap": lambda h: h.vmap(h.grad(lambda x: h.vmap(h.np.sin)(x).sum()))(h.array(normal(3, 5, 3))),
    "vmap of vmap": lambda h: h.vmap(h.vmap(lambda x, y: x * y, in_axes=(0, None)), in_axes=(None, 0))(
        h.array(normal(0, 3)), h.array(normal(1, 4))
    ),
    "jvp of grad (a Hessian times a vector)": lambda h: h.jvp(
        lambda p: h.grad(lambda p: network(h, p, h.array(normal(3, 5, 3))))(p), (weights(h),), (weights(h),)
    ),
    "grad of jvp": lambda h: h.grad(lambda x: h.jvp(lambda y: h.np.sin(y) * x, (x,), (x**2,))[1])(h.array(0.7)),
    "grad of jvp that closes over params": lambda h: h.grad(
        lambda p: h.jvp(lambda x: network(h, p, x), (h.array(normal(3, 5, 3)),), (h.array(normal(4, 5, 3)),))[1]
    )(weights(h)),
    "jvp of jvp": lambda h: h.jvp(lambda x: h.jvp(h.np.sin, (x,), (x,))[1], (h.array(0.7),), (h.array(1.3),)),
    "jvp of vjp": lambda h: h.jvp(lambda x: h.vjp(h.np.sin, x)[1](x), (h.array([0.7, 0.2]),), (h.array([1.3, 1.0]),)),
    "vjp of jvp": lambda h: h.vjp(lambda x: h.jvp(h.np.sin, (x,), (x,))[1], h.array([0.7, 0.2]))[1](h.array([1.0, 2.0])),
    "grad of vjp": lambda h: h.grad(lambda x: (h.vjp(h.np.sin, x)[1](x**2)[0] ** 2).sum())(h.array([0.7, 0.2])),
    "grad by the cotangent": lambda h: h.grad(lambda c: (h.vjp(h.np.sin, h.array([0.7, 0.2]))[1](c)[0] ** 2).sum())(h.array([1.0, 2.0])),
    "Jacobian by vmap of a pullback": lambda h: h.vmap(h.vjp(lambda x: h.np.sin(x) * x[0], h.array([0.7, 0.2]))[1])(h.array(np.eye(2))),
    "Jacobian by vmap of jvp": lambda h: h.vmap(lambda v: h.jvp(lambda x: h.np.sin(x) * x[0], (h.array([0.7, 0.2]),), (v,))[1])(
        h.array(np.eye(2))
    ),
    "vmap of jvp of grad": lambda h: h.vmap(lambda v: h.jvp(h.grad(lambda x: (x**3).sum()), (h.array([0.7, 0.2]),), (v,))[1])(
        h.array(np.eye(2))
    ),
    "grad of the trace of a Hessian": lambda h: h.grad(
        lambda x: h.np.trace(h.vmap(lambda v: h.jvp(h.grad(lambda y: (h.np.sin(y) ** 2).sum() * y[0]), (x,), (v,))[1])(h.array(np.eye(2))))
    )(h.array([0.7, 0.2])),
    "pullback made outside, used inside a gradient": lambda h: gradient_by_cotangent(h, h.vjp(h.np.sin, h.array([0.7, 0.2]))[1]),
}


@pytest.mark.parametrize("name", NESTED)
def test_transforms_nest_as_in_jax(name: str) -> None:
    both(NESTED[name])


def test_inside_torch_func_our_gradient_is_right() -> None:
    x = torch.tensor([0.7, 0.2], dtype=torch.float64)
    hessian = torch.func.jacfwd(grad(lambda x: (x**3).sum()))(x)
    assert_trees_close(hessian, torch.diag(6 * x), **TIGHT)
    assert_trees_close(torch.func.grad(lambda x: grad(lambda y: (y**3).sum())(x).sum())(x), 6 * x, **TIGHT)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_per_sample_gradients_equal_a_loop(batch: int, width: int, depth: int) -> None:
    params = {f"w{i}": torch.as_tensor(normal(i, width, width)) for i in range(depth)} | {"last": torch.as_tensor(normal(9, width))}
    x = torch.as_tensor(normal(10, batch, width))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(depth):
            x = torch.tanh(params[f"w{i}"] @ x)
        return (params["last"] * x).sum()

    one_by_one = [grad(loss)(params, row) for row in x]
    assert_trees_close(vmap(grad(loss), in_axes=(None, 0))(params, x), tree.map(lambda *rows: torch.stack(rows), *one_by_one), **TIGHT)


# ---- vjp and jvp over trees


def test_vjp_of_trees_equals_jax() -> None:
    def text(h: Here) -> Any:
        result, pull = h.vjp(lambda a, b: {"sum": a["x"] + b, "product": (a["x"] * b,)}, {"x": h.array([1.0, 2.0])}, h.array([3.0, 4.0]))
        return result, pull({"sum": h.array([1.0, 0.0]), "product": (h.array([0.0, 1.0]),)}), pull(result)

    both(text)


def test_vjp_passes_aux_and_integers() -> None:
    result, pull, aux = vjp(lambda x: ((x * 2, (x > 1).long()), {"n": 1}), torch.tensor([1.0, 2.0]), has_aux=True)
    assert_trees_equal(result, (torch.tensor([2.0, 4.0]), torch.tensor([0, 1])))
    assert aux == {"n": 1}
    assert_trees_equal(pull((torch.ones(2), torch.ones(2, dtype=torch.int64))), (torch.full((2,), 2.0),))


def test_jvp_of_trees_equals_jax() -> None:
    both(
        lambda h: h.jvp(lambda a, b: {"s": a["x"] * b, "only": b}, ({"x": h.array([1.0, 2.0])}, 3.0), ({"x": h.array([0.5, 0.1])}, 1.0)),
        rtol=1e-6,
    )


def test_jvp_passes_aux_and_integers_and_gives_zeros() -> None:
    n = torch.tensor([1, 2])
    result, derivative, aux = jvp(lambda x, n: ((x * n, n, torch.ones(1)), "aux"), (torch.ones(2), n), (torch.ones(2), n), has_aux=True)
    assert_trees_equal(result, (torch.tensor([1.0, 2.0]), n, torch.ones(1)))
    assert_trees_equal(derivative, (torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.int64), torch.zeros(1)))
    assert aux == "aux"


# ---- vmap


@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [(0, 0), (1, 1), ((0, 1), 0), ((None, 0), -1), (({"a": 0, "b": None}, 1), 0), (((0), None), {"r": 1, "s": 0}), ([0, 1], 0)],
)
def test_axes_are_those_of_jax(in_axes: Any, out_axes: Any) -> None:
    def text(h: Here) -> Any:
        first = {"a": h.array(normal(0, 3, 3)), "b": h.array(normal(1, 3, 3))}
        axes = (in_axes, in_axes) if h is JAX and isinstance(in_axes, int) else in_axes
        return h.vmap(lambda p, x: {"r": p["a"] * x.sum() + p["b"].sum(), "s": x * 2}, axes, out_axes)(first, h.array(normal(2, 3, 3)))

    both(text)


def test_a_result_without_axis_and_keyword_arguments() -> None:
    both(lambda h: h.vmap(lambda x, w: (x * 2, w + 1), in_axes=(0, None), out_axes=(0, None))(h.array(normal(0, 3)), h.array([1.0])))
    both(lambda h: h.vmap(lambda x, *, y: x * y)(h.array(normal(0, 3)), y=h.array(normal(1, 3))))
    both(lambda h: h.vmap(lambda x: (x, 1.0, None))(h.array(normal(0, 3))))


def test_structs_pass_through_vmap() -> None:
    layers = Layer(w=torch.ones(4, 2, 2), b=torch.zeros(4, 2))
    out = vmap(lambda layer: layer.replace(b=layer.b + layer.w.sum()))(layers)
    assert_trees_equal(out, Layer(w=torch.ones(4, 2, 2), b=torch.full((4, 2), 4.0)))


# ---- errors in the user's terms


def fails(kind: type[Exception], *words: str) -> contextlib.AbstractContextManager[Any]:
    return pytest.raises(kind, match=".*".join(words))


def per_token(p: torch.Tensor) -> torch.Tensor:
    return p * 2


def test_errors_say_what_to_change() -> None:
    x = torch.ones(4, 3)
    with fails(TypeError, "per_token", r"shape \[4, 3\]", r"\.mean\(\)", "ft.Mean"):
        value_and_grad(per_token)(x)
    with fails(TypeError, "int64"):
        value_and_grad(lambda p: p.sum().long())(x)
    with fails(TypeError, "has_aux=True"):
        value_and_grad(lambda p: (p.sum(), p))(x)
    with fails(TypeError, "pair", r"shape \[\]"):
        value_and_grad(lambda p: p.sum(), has_aux=True)(x)
    with fails(TypeError, "ft.Mean whose total", r"\[4, 3\]"):
        value_and_grad(lambda p: tree.Mean(p, torch.ones(())))(x)
    with fails(TypeError, "ft.Mean whose weight", r"\[2\]"):
        value_and_grad(lambda p: tree.Mean(p.sum(), torch.ones(2)))(x)
    with fails(ValueError, "argnums=2", "1 positional argument"):
        grad(per_token, argnums=2)(x)
    with fails(TypeError, "argnums", "'w'"):
        grad(per_token, argnums="w")(x)  # type: ignore[arg-type]
    with fails(TypeError, "no floating-point tensor", "int64"):
        grad(per_token)(torch.arange(3))
    with fails(TypeError, "leaf a/0 is str"):
        grad(per_token)({"a": ["text"], "b": x})


def test_errors_of_products_name_the_leaf() -> None:
    x = torch.ones(2)
    with fails(tree.StructureError, "cotangent", "dict of 1", "tensor"):
        vjp(lambda x: {"y": x}, x)[1](x)
    with fails(ValueError, "leaf y", r"\[3\]", r"\[2\]"):
        vjp(lambda x: {"y": x}, x)[1]({"y": torch.ones(3)})
    with fails(ValueError, "leaf 0/w of the tangents", "float64", "float32"):
        jvp(lambda p: p["w"], ({"w": x},), ({"w": x.double()},))
    with fails(TypeError, "tuple of primals"):
        jvp(lambda p: p, x, x)  # type: ignore[arg-type]


def test_errors_of_vmap_name_the_argument() -> None:
    x = torch.ones(4, 3)
    with fails(ValueError, "1/y has 3 along axis 1", r"\[4, 3\]"):
        vmap(lambda a, b: a, in_axes=(0, 1))(x, {"y": x})
    with fails(ValueError, "in_axes has 1 entries", "2 positional"):
        vmap(lambda a, b: a, in_axes=(0,))(x, x)
    with fails(ValueError, "at least one argument"):
        vmap(lambda a: a, in_axes=None)(x)
    with fails(ValueError, "axis 2", r"\[4, 3\]"):
        vmap(lambda a: a, in_axes=2)(x)
    with fails(ValueError, "differs between slices", "axis"):
        vmap(lambda a: {"y": a}, out_axes=None)(x)
    with fails(ValueError, "does not fit"):
        vmap(lambda a: a, in_axes=({"z": 0},))({"y": x})
    with fails(RuntimeError, "random"):
        vmap(lambda a: torch.rand(2))(x)
