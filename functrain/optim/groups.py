"""Other transformations for other leaves: masks and named groups."""

from collections.abc import Mapping
from typing import Any

from functrain import tree
from functrain.optim.base import GradientTransformation, transformation
from functrain.optim.masks import Mask, as_mask, per_leaf
from functrain.tree import PyTree, struct


@struct
class MaskedState:
    """The state of a transformation that sees some of the leaves; the others are None in it."""

    inner_state: PyTree


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Apply `inner` to the leaves that the mask names; the others pass through and carry no state.

    Args:
        inner: the transformation.
        mask: a tree of bools, which may stop above the leaves; a function of the params that returns one; a path pattern or a list of
            them; or ``{pattern: bool}``, first match wins.

    Raises:
        ValueError: a pattern matches no leaf.

    >>> import torch
    >>> from functrain.optim import scale
    >>> tx = masked(scale(2.0), "w")
    >>> tx.update({"w": torch.ones(1), "b": torch.ones(1)}, tx.init({"w": torch.ones(1), "b": torch.ones(1)}))[0]
    {'w': tensor([2.]), 'b': tensor([1.])}
    """

    def init(params: PyTree) -> MaskedState:
        return MaskedState(inner.init(_kept(as_mask(mask, params), params)))

    def update(grads: PyTree, state: MaskedState, params: PyTree = None) -> tuple[PyTree, MaskedState]:
        keep = as_mask(mask, grads)
        below = None if params is None else _kept(keep, params)
        changed, inner_state = inner.update(_kept(keep, grads), state.inner_state, below)
        rest = tree.map(lambda k, g: None if k else g, keep, grads)
        return tree.combine(changed, rest), MaskedState(inner_state)

    return transformation(init, update)


def _kept(keep: PyTree, values: PyTree) -> PyTree:
    return tree.map(lambda k, value: value if k else None, keep, values)


@struct
class MultiTransformState:
    """States of the groups by name."""

    inner_states: dict[Any, PyTree]


def multi_transform(transforms: Mapping[Any, GradientTransformation], param_labels: Any) -> GradientTransformation:
    """Each leaf goes to the transformation of its group (Optax's `multi_transform`, also called `partition`).

    Args:
        transforms: group name -> transformation.
        param_labels: group name of each leaf: a tree, a function of the params, or ``{path pattern: name}``, first match wins.

    Raises:
        ValueError: a label that no transformation has, or a leaf without one; names the leaf.

    >>> import torch
    >>> from functrain.optim import scale
    >>> tx = multi_transform({"slow": scale(-0.1), "fast": scale(-1.0)}, {"head/**": "fast", "**": "slow"})
    >>> params = {"body": torch.ones(1), "head": {"w": torch.ones(1)}}
    >>> tx.update(params, tx.init(params))[0]
    {'body': tensor([-0.1000]), 'head': {'w': tensor([-1.])}}
    """

    def groups(params: PyTree) -> dict[Any, GradientTransformation]:
        labels = per_leaf(param_labels, params)
        for path, label in tree.leaves_with_path(labels):
            if label not in transforms:
                raise ValueError(f"{path} is in group {label!r}, but there are only {', '.join(map(repr, transforms))}")
        return {name: masked(tx, tree.map(lambda label, name=name: label == name, labels)) for name, tx in transforms.items()}

    def init(params: PyTree) -> MultiTransformState:
        return MultiTransformState({name: tx.init(params) for name, tx in groups(params).items()})

    def update(grads: PyTree, state: MultiTransformState, params: PyTree = None) -> tuple[PyTree, MultiTransformState]:
        states = {}
        for name, tx in groups(grads).items():
            grads, states[name] = tx.update(grads, state.inner_states[name], params)
        return grads, MultiTransformState(states)

    return transformation(init, update)
