"""LAMB: Adam's direction, each leaf scaled by the ratio of its norms."""

import torch

from functrain import tree
from functrain.optim.adam import scale_by_adam
from functrain.optim.base import GradientTransformation, ScalarOrSchedule, chain, need_params, stateless
from functrain.optim.masks import Mask
from functrain.optim.scaling import add_decayed_weights, scale_by_learning_rate


def scale_by_trust_ratio(min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0) -> GradientTransformation:
    """Multiply each leaf by ``trust_coefficient * |param| / (|update| + eps)``; by 1 where either norm is 0.

    >>> tx = scale_by_trust_ratio()
    >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({}), {"w": torch.tensor([0.0, 10.0])})[0]["w"]
    tensor([6., 8.])
    """

    def one(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        size, step = (torch.clamp(torch.linalg.vector_norm(x), min=min_norm) for x in (p, u))
        ratio = trust_coefficient * size / (step + eps)
        return u * torch.where((size == 0) | (step == 0), torch.ones_like(ratio), ratio)

    return stateless(lambda grads, params: tree.map(one, grads, need_params("scale_by_trust_ratio", params)))


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Mask = None,
) -> GradientTransformation:
    """LAMB (You et al. 2020, arXiv 1904.00962): Adam, weight decay, and a trust ratio for each leaf.

    >>> tx = lamb(0.5)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> torch.linalg.vector_norm(tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]["w"])
    tensor(2.5000)
    """
    parts = [scale_by_adam(b1, b2, eps, eps_root), add_decayed_weights(weight_decay, mask), scale_by_trust_ratio()]
    return chain(*parts, scale_by_learning_rate(learning_rate))
