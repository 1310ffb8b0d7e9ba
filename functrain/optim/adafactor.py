"""Adafactor: second moments of a matrix as the product of its row and column means."""

from typing import Any

import numpy as np
import torch

from functrain import tree
from functrain.optim.averages import ema
from functrain.optim.base import (
    GradientTransformation,
    ScalarOrSchedule,
    chain,
    increment,
    map_rows,
    need_params,
    scale,
    stateless,
    transformation,
    zero_count,
    zeros,
)
from functrain.optim.masks import Mask
from functrain.optim.scaling import add_decayed_weights, scale_by_learning_rate
from functrain.tree import PyTree, struct


@struct
class FactoredState:
    """Means of squared gradients. What a leaf does not use is a zero of shape [1]."""

    count: torch.Tensor  # updates so far, int32 scalar
    v_row: PyTree  # mean over the largest dimension, for leaves that are factored
    v_col: PyTree  # mean over the second largest
    v: PyTree  # for leaves that are not


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> GradientTransformation:
    """Divide by a factored estimate of the root mean square (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4).

    Args:
        factored: whether large matrices are factored at all.
        decay_rate: exponent of the decay ``1 - (count + 1) ** -decay_rate``.
        step_offset: steps to leave out of the count.
        min_dim_size_to_factor: the two largest dimensions must be at least this.
        epsilon: added to squared gradients.

    >>> tx = scale_by_factored_rms(min_dim_size_to_factor=2)
    >>> params = {"w": torch.ones(2, 3)}
    >>> tx.update({"w": torch.full((2, 3), 5.0)}, tx.init(params), params)[0]["w"].round(decimals=4)[0]
    tensor([1., 1., 1.])
    """

    def init(params: PyTree) -> FactoredState:
        def one(p: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
            dims, nothing = _factored_dims(tuple(p.shape), factored, min_dim_size_to_factor), p.new_zeros(1)
            if dims is None:
                return nothing, nothing.clone(), whole
            return p.new_zeros(_without(p.shape, dims[1])), p.new_zeros(_without(p.shape, dims[0])), nothing

        return FactoredState(zero_count(params), *map_rows(one, 3, params, zeros("adafactor", params)))

    def update(grads: PyTree, state: FactoredState, params: PyTree = None) -> tuple[PyTree, FactoredState]:
        need_params("scale_by_factored_rms", params)
        decay = 1.0 - (state.count - step_offset + 1).to(torch.float64) ** -decay_rate

        def one(g: torch.Tensor, row: Any, column: Any, v: Any, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
            squares = g.square() + epsilon
            dims = _factored_dims(tuple(p.shape), factored, min_dim_size_to_factor)
            if dims is None:
                v = (decay * v + (1 - decay) * squares).to(p.dtype)
                return g * v**-0.5, row, column, v
            second, largest = dims
            row = (decay * row + (1 - decay) * squares.mean(largest)).to(p.dtype)
            column = (decay * column + (1 - decay) * squares.mean(second)).to(p.dtype)
            over = second - 1 if second > largest else second
            row_factor = (row / row.mean(over, keepdim=True)) ** -0.5
            return g * row_factor.unsqueeze(largest) * (column**-0.5).unsqueeze(second), row, column, v

        updates, rows, columns, rest = map_rows(one, 4, grads, state.v_row, state.v_col, state.v, params)
        return updates, FactoredState(increment(state.count), rows, columns, rest)

    return transformation(init, update)


def _factored_dims(shape: tuple[int, ...], factored: bool, least: int) -> tuple[int, int] | None:
    """(second largest, largest) dimension, or None where the leaf is not factored."""
    if not factored or len(shape) < 2:
        return None
    order = np.argsort(shape)
    return None if shape[order[-2]] < least else (int(order[-2]), int(order[-1]))


def _without(shape: torch.Size, dim: int) -> list[int]:
    return [size for d, size in enumerate(shape) if d != dim]


def clip_by_block_rms(threshold: float) -> GradientTransformation:
    """Scale each leaf so that its root mean square is at most `threshold`.

    >>> clip_by_block_rms(1.0).update({"w": torch.tensor([3.0, 3.0])}, clip_by_block_rms(1.0).init({}))[0]["w"]
    tensor([1., 1.])
    """

    def one(u: torch.Tensor) -> torch.Tensor:
        return u / torch.clamp(u.square().mean().sqrt() / threshold, min=1.0)

    return stateless(lambda grads, params: tree.map(one, grads))


def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Multiply each leaf by its param's root mean square, at least `min_scale`.

    >>> tx = scale_by_param_block_rms()
    >>> tx.update({"w": torch.ones(2)}, tx.init({}), {"w": torch.full((2,), 3.0)})[0]["w"]
    tensor([3., 3.])
    """

    def one(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return u * torch.clamp(p.square().mean().sqrt(), min=min_scale)

    return stateless(lambda grads, params: tree.map(one, grads, need_params("scale_by_param_block_rms", params)))


def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    dtype_momentum: torch.dtype = torch.float32,
    weight_decay_rate: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask = None,
) -> GradientTransformation:
    """Adafactor with Optax's parts and defaults; each part that is None or False is left out.

    >>> tx = adafactor(0.1)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([5.0, -5.0])}, tx.init(params), params)[0]["w"].round(decimals=4)
    tensor([-0.1000,  0.1000])
    """
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1.0))
