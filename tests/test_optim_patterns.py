"""Patterns where a group sees only some of the leaves, and functions that are mistaken for schedules."""

import pytest
import torch

from functrain import optim, tree


def layers() -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"w": torch.ones(3, 3), "b": torch.ones(3)} for name in ("body", "head")}


def nothing(params: object) -> object:
    return tree.map(torch.zeros_like, params)


def test_a_group_may_have_patterns_whose_leaves_are_all_in_another_group() -> None:
    """One decay mask serves every group, such as "no biases", though a group may hold none."""
    make = lambda: optim.adamw(1.0, weight_decay=0.5, mask={"**/b": False, "**": True})  # noqa: E731
    tx = optim.multi_transform({"matrices": make(), "biases": make()}, {"**/w": "matrices", "**": "biases"})
    params = layers()
    updates, _ = tx.update(nothing(params), tx.init(params), params)
    assert [float(updates[name][key].flatten()[0]) for name in ("body", "head") for key in ("w", "b")] == [-0.5, 0.0, -0.5, 0.0]


def test_muon_decays_the_matrices_that_a_list_of_patterns_names() -> None:
    tx = optim.muon(1.0, weight_decay=0.5, weight_decay_mask=["body/b", "head/w"])
    params = layers()
    updates, _ = tx.update(nothing(params), tx.init(params), params)
    assert [float(updates[name]["w"][0, 0]) for name in ("body", "head")] == [0.0, -0.5]


def test_a_pattern_that_names_no_leaf_at_all_is_still_an_error() -> None:
    groups = {"matrices": optim.adamw(1.0, mask="**/bias"), "biases": optim.sgd(1.0)}
    tx = optim.multi_transform(groups, {"**/w": "matrices", "**": "biases"})
    params = layers()
    with pytest.raises(ValueError, match=r"pattern '\*\*/bias' matches no leaf"):
        tx.update(nothing(params), tx.init(params), params)


def test_a_mask_that_runs_as_a_schedule_is_an_error_and_not_a_bool() -> None:
    """A function of the leaves runs on a count as well: what it says of a scalar would be the mask of every leaf."""
    matrices = lambda params: tree.map(lambda x: x.dim() > 1, params)  # noqa: E731
    with pytest.raises(TypeError, match=r"given as mask was taken for a schedule.*static_args \(it returned a bool\)"):
        optim.inject_hyperparams(optim.adamw)(0.1, mask=matrices).init(layers())
    tx = optim.inject_hyperparams(optim.adamw, static_args="mask")(1.0, weight_decay=0.5, mask=matrices)
    params = layers()
    updates, _ = tx.update(nothing(params), tx.init(params), params)
    assert (float(updates["body"]["w"][0, 0]), float(updates["body"]["b"][0])) == (-0.5, 0.0)
