"""Trees behave as JAX's, with paths and patterns on top."""

from collections import OrderedDict
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functrain as ft
from functrain import tree
from tests.helpers import assert_trees_close


class Pair(NamedTuple):
    left: Any
    right: Any


@tree.struct
class Layer:
    weight: Any
    bias: Any = None
    name: str = tree.field(static=True, default="layer")


keys = st.text("abcz_", min_size=1, max_size=4)
trees = st.recursive(
    st.integers(0, 9) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(trees)
def test_leaves_come_in_jaxs_order(value: Any) -> None:
    assert tree.leaves(value) == jax.tree.leaves(value)


@given(trees)
def test_flatten_and_unflatten_are_inverse(value: Any) -> None:
    leaves, structure = tree.flatten(value)
    assert tree.unflatten(structure, leaves) == value
    assert tree.structure(value) == structure


@given(trees)
def test_paths_lead_to_their_leaves(value: Any) -> None:
    for path, leaf in tree.leaves_with_path(value):
        at = value
        for name in path.split("/") if path else []:
            at = getattr(at, name) if isinstance(at, Pair) else at[int(name)] if isinstance(at, (list, tuple)) else at[name]
        assert at is leaf or at == leaf


def test_paths_of_named_nodes() -> None:
    value = {"a": Pair(1, [2, Layer(weight=3)]), "b": None}
    assert tree.paths(value) == ["a/left", "a/right/0", "a/right/1/weight"]


def test_map_over_several_trees() -> None:
    one, two = {"x": [1, 2], "y": Pair(3, None)}, {"x": [10, 20], "y": Pair(30, None)}
    assert tree.map(lambda a, b: a + b, one, two) == {"x": [11, 22], "y": Pair(33, None)}
    assert tree.map(lambda a, b: (a, b), {"x": 1}, {"x": {"deeper": 2}}) == {"x": (1, {"deeper": 2})}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"a": [1, 2, 3], "b": Layer(0)}, "at a: list of 2 against list of 3"),
        ({"a": [1, 2]}, "the root: dict of 2 against dict of 1 (only on the left: b)"),
        ({"a": (1, 2), "b": Layer(0)}, "at a: list of 2 against tuple of 2"),
        ({"a": [1, 2], "b": Layer(0, name="other")}, "at b: static fields ('layer',) against ('other',)"),
        ({"a": [1, 2], "b": Pair(0, 1)}, "at b: Layer of 2 against Pair of 2"),
        ({"a": torch.ones(2, 3), "b": Layer(0)}, "at a: list of 2 against tensor [2, 3] float32"),
    ],
)
def test_a_mismatch_names_path_and_both_sides(other: Any, says: str) -> None:
    with pytest.raises(tree.StructureError) as caught:
        tree.map(lambda a, b: a, {"a": [1, 2], "b": Layer(0)}, other)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("blocks/*/w", "blocks/0/w", True),
        ("blocks/*/w", "blocks/0/mlp/w", False),
        ("blocks/**/w", "blocks/w", True),
        ("blocks/**/w", "blocks/0/mlp/w", True),
        ("**", "anything/at/all", True),
        ("**/w", "w", True),
        ("params/**", "params", True),
        ("params/**", "params/a/b", True),
        ("params/**", "paramset/a", False),
        ("layer?", "layer1", True),
        ("layer?", "layer12", False),
        ("*", "a/b", False),
        ("a.b", "axb", False),
        ("*norm*/scale", "final_norm/scale", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert tree.matches(pattern, path) is expected


def test_select_partition_and_combine() -> None:
    value = {"a": {"w": 1, "b": 2}, "c": [3, None]}
    assert tree.select(value, "**/w", "c/*") == {"a/w": 1, "c/0": 3}
    inside, outside = tree.partition(value, "a/**")
    assert tree.leaves(inside) == [2, 1]
    assert tree.leaves(outside) == [3]
    assert tree.combine(inside, outside) == value
    with pytest.raises(ValueError, match=r"'a/x' matches no leaf; nearest paths: a/[bw]"):
        tree.select(value, "a/x")


def test_struct_is_frozen_replaces_and_has_static_fields() -> None:
    layer = Layer(weight=1)
    assert layer.replace(weight=2) == Layer(weight=2)
    with pytest.raises(AttributeError):
        layer.weight = 3
    assert tree.leaves(Layer(1, 2, name="n")) == [1, 2]
    assert tree.map(lambda x: x + 1, Layer(1, 2, name="n")) == Layer(2, 3, name="n")
    assert tree.structure(Layer(1, name="a")) != tree.structure(Layer(1, name="b"))


def test_registering_stays_in_the_namespace() -> None:
    import optree  # noqa: PLC0415

    assert optree.tree_leaves(Layer(1, 2)) == [Layer(1, 2)]


def test_global_norm_cast_size() -> None:
    value = {"a": torch.tensor([3.0, 0.0]), "b": [torch.tensor([[4.0]]), torch.arange(3)]}
    assert float(tree.global_norm(value)) == 5.0
    assert float(tree.global_norm({})) == 0.0
    half = tree.cast(value, torch.bfloat16)
    assert [x.dtype for x in tree.tensors(half)] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert float(tree.global_norm(half)) == 5.0
    assert (tree.size(value), tree.nbytes(value)) == (6, 36)
    assert tree.cast(value, None) is value


def test_global_norm_agrees_with_optax() -> None:
    import optax  # noqa: PLC0415

    value = {"a": torch.randn(5, 7), "b": torch.randn(11)}
    expected = optax.tree.norm({k: v.numpy() for k, v in value.items()})
    np.testing.assert_allclose(float(tree.global_norm(value)), float(expected), rtol=1e-6)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=6))
def test_means_merge_exactly(parts: list[tuple[float, int]]) -> None:
    means = [ft.Mean(torch.tensor(total, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64)) for total, weight in parts]
    merged = sum(means[1:], means[0])
    weight = sum(w for _, w in parts)
    expected = sum(t for t, _ in parts) / weight if weight else 0.0
    assert float(merged.value()) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_an_empty_mean_has_zero_gradient() -> None:
    total = torch.tensor(3.0, requires_grad=True)
    value = ft.Mean(total, torch.tensor(0.0)).value()
    value.backward()
    assert (float(value.detach()), float(total.grad)) == (0.0, 0.0)


def test_transpose() -> None:
    one, two = tree.transpose(tree.structure({"a": 0, "b": [0]}), [(1, 2), (3, 4)], 2)
    chex.assert_trees_all_equal(one, {"a": 1, "b": [3]})
    chex.assert_trees_all_equal(two, {"a": 2, "b": [4]})


def test_comparing_trees_says_path_index_and_values() -> None:
    with pytest.raises(AssertionError, match=r"a/1 index \(2,\): .*9\.0.* against .*3\.0.* \(1 of 3 differ\)"):
        assert_trees_close({"a": [torch.zeros(1), torch.tensor([1.0, 2.0, 9.0])]}, {"a": [torch.zeros(1), torch.tensor([1.0, 2.0, 3.0])]})
