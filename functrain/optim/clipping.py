"""Bounds on gradients."""

import torch

from functrain import tree
from functrain.optim.base import GradientTransformation, stateless, times
from functrain.tree import PyTree


def clip(max_delta: float) -> GradientTransformation:
    """Bound each element to [-max_delta, max_delta].

    >>> clip(1.0).update({"w": torch.tensor([-3.0, 0.5])}, clip(1.0).init({}))[0]["w"]
    tensor([-1.0000,  0.5000])
    """
    return stateless(lambda grads, params: tree.map(lambda g: torch.clamp(g, -max_delta, max_delta), grads))


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scale all gradients together so that their common Euclidean norm is at most `max_norm` (Pascanu et al. 2013, arXiv 1211.5063).

    Each leaf is multiplied once by one shared factor, which the compiler folds into a fused optimizer. The norm is `tree.global_norm` of
    the gradients: one reduction a leaf, and one over the leaves. As a metric, take `tree.global_norm(grads)` of the same gradients: in a
    captured step these are the same operations on the same inputs, so a compiler that merges equal ones computes them once.

    >>> tx = clip_by_global_norm(1.0)
    >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({}))[0]["w"]
    tensor([0.6000, 0.8000])
    """

    def scaled(grads: PyTree, params: PyTree) -> PyTree:
        norm = tree.global_norm(grads)
        factor = torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)
        return times(grads, factor)

    return stateless(scaled)
