"""Muon: momentum made orthogonal for matrices, AdamW for the rest."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from functrain import tree
from functrain.differentiate import active_markers
from functrain.optim.adam import adamw
from functrain.optim.averages import bias_correction
from functrain.optim.base import (
    GradientTransformation,
    ScalarOrSchedule,
    chain,
    increment,
    stateless,
    transformation,
    widest,
    zero_count,
    zeros,
)
from functrain.optim.groups import multi_transform
from functrain.optim.masks import Mask, per_leaf
from functrain.optim.scaling import add_decayed_weights, scale_by_learning_rate
from functrain.tree import PyTree, struct

QUINTIC = (3.4445, -4.775, 2.0315)
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
PRESETS: dict[str, Any] = {"standard": QUINTIC, "dion": DION}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")


class MuonDimensionNumbers(NamedTuple):
    """Which dimensions of a weight are summed over and which it returns: PyTorch's linear layers have (1, 0)."""

    reduction_axis: int | tuple[int, ...] = 0
    output_axis: int | tuple[int, ...] = 1


# One for all leaves, or for each: a tree, a function of the params, or {path pattern: numbers}
DimensionNumbers = MuonDimensionNumbers | PyTree | Callable[[PyTree], PyTree] | None


@struct
class MuonState:
    """A running mean of gradients."""

    count: torch.Tensor  # updates so far, int32 scalar
    mu: PyTree  # in the structure of the params
    ns_coeffs: torch.Tensor  # of Newton and Schulz's iteration, [3] or [steps, 3]


def scale_by_muon(
    ns_coeffs: Sequence[Any] = QUINTIC,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    weight_dimension_numbers: DimensionNumbers = None,
) -> GradientTransformation:
    """The nearest orthogonal matrix to the momentum, by Newton and Schulz's iteration (Jordan et al. 2024, Muon).

    Args:
        ns_coeffs: coefficients of the iteration's odd quintic, one triple for all steps or one for each (`ns_steps` does not count
            then).
        ns_steps: how many steps.
        beta: decay of the mean of gradients.
        eps: added to the norm that a matrix is divided by first.
        mu_dtype: of the mean; the param's where None.
        nesterov: Nesterov's momentum.
        adaptive: scale by the inner product with the momentum (Bernstein and Newhouse 2024, arXiv 2409.20325).
        preconditioning: what a matrix is divided by before: "frobenius", "spectral", "aol" or "schatten".
        weight_dimension_numbers: how a leaf is a matrix, for all leaves or for each; leaves are plain matrices where None.

    Raises:
        ValueError: an unknown preconditioning, or coefficients of another shape.

    >>> tx = scale_by_muon()
    >>> update = tx.update({"w": torch.diag(torch.tensor([4.0, 1.0]))}, tx.init({"w": torch.zeros(2, 2)}))[0]["w"]
    >>> bool((update.diagonal() > 0.6).all())
    True
    """
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(f"preconditioning {preconditioning!r} is unknown; choose one of {', '.join(PRECONDITIONINGS)}")
    table = torch.tensor(ns_coeffs, dtype=torch.float64)
    if table.dim() not in (1, 2) or table.shape[-1] != 3:
        raise ValueError(f"ns_coeffs has shape {list(table.shape)}; it must be [3], or [n, 3] for n steps")

    def init(params: PyTree) -> MuonState:
        count = zero_count(params)
        kept = torch.tensor(ns_coeffs, dtype=widest(params), device=count.device)
        return MuonState(count, zeros("muon", params, mu_dtype), kept)

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        count = increment(state.count)
        mu = tree.map(lambda g, m: (1 - beta) * g + beta * m, grads, state.mu)
        now, ahead = bias_correction(beta, count), bias_correction(beta, increment(count))

        def momentum(m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            return beta * (m / ahead) + (1 - beta) * (g / now) if nesterov else m / now

        hat = tree.map(momentum, mu, grads)
        triples = _triples(state.ns_coeffs, ns_steps)
        numbers = _numbers(weight_dimension_numbers, grads)
        pairs: list[tuple[torch.Tensor, MuonDimensionNumbers | None]] = []
        tree.map(lambda x, n: pairs.append((x, n)), hat, numbers)
        updates = tree.unflatten(tree.structure(hat), orthogonalize_all(pairs, triples, eps, preconditioning))
        if adaptive:
            updates = tree.map(lambda x, y: (x * y).sum() * y, hat, updates)
        return updates, MuonState(count, tree.map(lambda new, old: new.to(old.dtype), mu, state.mu), state.ns_coeffs)

    return transformation(init, update)


def _triples(coefficients: torch.Tensor, steps: int) -> list[Sequence[Any]]:
    """The three coefficients of each step, as scalars."""
    if coefficients.dim() == 1:
        return [coefficients.unbind()] * steps
    return [row.unbind() for row in coefficients.unbind()]


def _is_numbers(value: Any) -> bool:
    return value is None or isinstance(value, MuonDimensionNumbers)


def _numbers(given: DimensionNumbers, values: PyTree) -> PyTree:
    """The dimension numbers of each leaf. Patterns need not match here: in `muon`, part of the leaves is with Adam."""
    return per_leaf(MuonDimensionNumbers() if given is None else given, values, is_leaf=_is_numbers, check=False)


def orthogonalize(
    x: torch.Tensor,
    triples: Sequence[Sequence[Any]] = (QUINTIC,) * 5,
    eps: float = 1e-8,
    preconditioning: str = "frobenius",
    numbers: MuonDimensionNumbers | None = None,
) -> torch.Tensor:
    """Drive the singular values of a matrix (or of each of a stack) towards 1.

    >>> torch.linalg.svdvals(orthogonalize(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))).min() > 0.6
    tensor(True)
    """
    return orthogonalize_all([(x, numbers)], triples, eps, preconditioning)[0]


def orthogonalize_all(
    pairs: Sequence[tuple[torch.Tensor, MuonDimensionNumbers | None]],
    triples: Sequence[Sequence[Any]],
    eps: float,
    preconditioning: str,
) -> list[torch.Tensor]:
    """`orthogonalize` for many leaves: matrices of one shape are worked on as one stack, which a mesh splits among its ranks."""
    flats = [_flat(x, numbers or MuonDimensionNumbers()) for x, numbers in pairs]
    groups: dict[Any, list[int]] = {}
    for i, flat in enumerate(flats):
        groups.setdefault((flat.shape[1:], flat.dtype, flat.device), []).append(i)
    found: list[torch.Tensor] = list(flats)
    markers = active_markers()
    for group in groups.values():
        stack = torch.cat([flats[i] for i in group]) if len(group) > 1 else flats[group[0]]
        if markers is None:
            result = _orthogonal(stack, triples, eps, preconditioning)
        else:
            result = markers.spread_like(_orthogonal(markers.spread(stack), triples, eps, preconditioning), stack)
        for i, part in zip(group, result.split([len(flats[i]) for i in group]), strict=True):
            found[i] = part
    return [_unflat(y, x, numbers or MuonDimensionNumbers()) for y, (x, numbers) in zip(found, pairs, strict=True)]


def _flat(x: torch.Tensor, numbers: MuonDimensionNumbers) -> torch.Tensor:
    """A leaf as a stack of matrices [batch, rows, columns], no taller than wide."""
    batch, reduced, out = _axes(x, numbers)
    flat = x.permute(*batch, *reduced, *out).reshape([math.prod(x.shape[a] for a in axes) for axes in (batch, reduced, out)])
    return flat.mT if flat.shape[1] > flat.shape[2] else flat


def _unflat(y: torch.Tensor, x: torch.Tensor, numbers: MuonDimensionNumbers) -> torch.Tensor:
    """A stack of matrices in the shape of the leaf that it was made from."""
    batch, reduced, out = _axes(x, numbers)
    order = (*batch, *reduced, *out)
    if math.prod(x.shape[a] for a in reduced) > math.prod(x.shape[a] for a in out):
        y = y.mT
    return y.reshape([x.shape[a] for a in order]).permute(sorted(range(x.dim()), key=order.__getitem__))


def _orthogonal(y: torch.Tensor, triples: Sequence[Sequence[Any]], eps: float, preconditioning: str) -> torch.Tensor:
    """Each matrix of a stack."""
    if preconditioning == "frobenius":
        y = y / (torch.linalg.matrix_norm(y, keepdim=True) + eps)
    elif preconditioning == "spectral":
        y = y / (torch.linalg.matrix_norm(y, ord=2, keepdim=True) + eps)
    for i, triple in enumerate(triples):
        y = _iterate(y, triple, preconditioning if i == 0 else "frobenius")
    return y


def _iterate(x: torch.Tensor, triple: Sequence[Any], preconditioning: str) -> torch.Tensor:
    """One step ``a x + (b A + c A A) x`` with ``A = x x^T``; the first one may scale rows, which costs no extra product."""
    a = x @ x.mT
    if preconditioning == "aol":
        s = torch.clamp(a.abs().sum(-1), min=1e-8).rsqrt().unsqueeze(-1)
        x, a = x * s, a * s * s.mT
    elif preconditioning == "schatten":
        s = torch.clamp(torch.linalg.matrix_norm(a, keepdim=True), min=1e-8).rsqrt()
        x, a = x * s, a * s**2
    return triple[0] * x + (triple[1] * a + (triple[2] * a) @ a) @ x


def _axes(x: torch.Tensor, numbers: MuonDimensionNumbers) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(batch, reduction, output) dimensions of a leaf."""
    if x.dim() < 2:
        raise ValueError(f"muon needs matrices, but a leaf has shape {list(x.shape)}: give it to another optimizer")
    reduced, out = (tuple(a % x.dim() for a in ((axes,) if isinstance(axes, int) else axes)) for axes in numbers)
    if set(reduced) & set(out):
        raise ValueError(f"reduction and output dimensions must differ, but {numbers} shares some for shape {list(x.shape)}")
    return tuple(d for d in range(x.dim()) if d not in (*reduced, *out)), reduced, out


def scale_by_shape(weight_dimension_numbers: DimensionNumbers = None, consistent_rms: float | None = None) -> GradientTransformation:
    """Scale orthogonal updates by their shape: ``sqrt(max(1, out / in))``, or ``sqrt(max(in, out)) * consistent_rms``.

    >>> scale_by_shape().update({"w": torch.ones(1, 4)}, scale_by_shape().init({}))[0]["w"]
    tensor([[2., 2., 2., 2.]])
    """

    def one(u: torch.Tensor, numbers: MuonDimensionNumbers) -> torch.Tensor:
        _, reduced, out = _axes(u, numbers)
        fan_in, fan_out = (math.prod(u.shape[a] for a in axes) for axes in (reduced, out))
        if consistent_rms is None:
            return u * math.sqrt(max(1, fan_out / max(fan_in, 1)))
        return u * (math.sqrt(max(fan_in, fan_out)) * consistent_rms)

    return stateless(lambda grads, params: tree.map(one, grads, _numbers(weight_dimension_numbers, grads)))


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: Sequence[Any] | str = QUINTIC,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbers = None,
    consistent_rms: float | None = None,
) -> GradientTransformation:
    """Muon for matrices and AdamW for all other leaves, with the names and defaults of `optax.contrib.muon`.

    Leaves of two dimensions are matrices. A linear layer's weight in PyTorch is [out, in], which is `MuonDimensionNumbers(1, 0)`; this
    changes the scale of its updates. `muon_weight_dimension_numbers` says how leaves are matrices, and which are: one
    `MuonDimensionNumbers` for all leaves of two or more dimensions, or one for each (a tree, a function of the params,
    ``{path pattern: numbers}``), None for those with Adam. `ns_coeffs` may be the name of a preset: "standard" or "dion".
    `consistent_rms` gives updates this root mean square for every shape (Liu et al. 2025, arXiv 2502.16982). The other arguments are
    those of `scale_by_muon` and `adamw`.

    Raises:
        ValueError: an unknown preset or preconditioning, or a leaf of fewer than two dimensions among the matrices.

    >>> tx = muon(0.1)
    >>> params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    >>> sorted(tx.init(params).inner_states)
    ['adam', 'muon']
    """
    numbers = muon_weight_dimension_numbers
    if isinstance(ns_coeffs, str) and ns_coeffs not in PRESETS:
        raise ValueError(f"ns_coeffs {ns_coeffs!r} is unknown; choose one of {', '.join(PRESETS)}, or give numbers")

    def labels(params: PyTree) -> PyTree:
        if numbers is None or isinstance(numbers, MuonDimensionNumbers):
            return tree.map(lambda x: "muon" if x.dim() == 2 or (numbers and x.dim() > 2) else "adam", params)
        each = per_leaf(numbers, params, is_leaf=_is_numbers)
        return tree.map(lambda _, n: "adam" if n is None else "muon", params, each)

    orthogonal = scale_by_muon(
        PRESETS[ns_coeffs] if isinstance(ns_coeffs, str) else ns_coeffs,
        ns_steps,
        beta,
        eps,
        mu_dtype,
        nesterov=nesterov,
        adaptive=adaptive,
        preconditioning=preconditioning,
        weight_dimension_numbers=numbers,
    )
    decay = add_decayed_weights(weight_decay, weight_decay_mask)
    matrices = chain(orthogonal, scale_by_shape(numbers, consistent_rms), decay, scale_by_learning_rate(learning_rate))
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    rest = adamw(rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, nesterov=nesterov)
    return multi_transform({"muon": matrices, "adam": rest}, labels)
