"""An `nn.Module` as a pure function: params and buffers go in as trees, the output and the new buffers come out."""

import collections
import contextlib
import copy
from collections.abc import Iterable, Mapping
from typing import Any

import optree
import torch
from torch import nn

from functrain import tree
from functrain.random.scoping import current_scope, is_random, scope
from functrain.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    innermost_checkpoint,
    storage_identity,
    transform_is_active,
    written_arguments,
)
from functrain.tree import PyTree


def from_module(module: nn.Module, *, frozen: str | Iterable[str] = ()) -> "PureModule":
    """Split a module into what it computes (`apply`) and what it holds (`params`, `buffers`).

    Params and buffers are copies, so whatever happens to them (donation included) leaves the module as it is. Tied weights appear once,
    under their first name, and their gradients add up.

    Frozen params stand among the buffers: they get no gradient and no optimizer state, and travel with the state all the same. Frozen are
    those that match a pattern, and those whose `requires_grad` is off.

    Args:
        module: any module; real, or on the meta device.
        frozen: path patterns of params, such as ``"vision/**"``.

    Raises:
        ValueError: a pattern matches no param, or a param has no shape yet (a lazy module).
        TypeError: the module holds something that cannot be copied.

    >>> model = from_module(nn.Linear(2, 3))
    >>> tree.paths(model.params)
    ['bias', 'weight']
    >>> output, buffers = model.apply(model.params, model.buffers, torch.ones(4, 2))
    >>> output.shape, buffers
    (torch.Size([4, 3]), {})
    """
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    lazy = [name for name, x in params.items() if isinstance(x, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(f"param {lazy[0]} of {type(module).__name__} has no shape yet: run the module once on real data first")
    patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    tree.check_patterns(patterns, [_path(name) for name in params])
    still = [n for n, x in params.items() if not x.requires_grad or any(tree.matches(p, _path(n)) for p in patterns)]
    return PureModule(module, [n for n in params if n not in still], still, list(buffers))


class PureModule:
    """What `from_module` returns."""

    params: PyTree
    """What is trained: a nested dict, `blocks.0.attn.qkv` at path `blocks/0/attn/qkv`."""

    buffers: PyTree
    """What is not: the module's buffers (those that it does not save, too), and its frozen params; a nested dict."""

    def __init__(self, module: nn.Module, trained: list[str], frozen: list[str], buffers: list[str]) -> None:
        self.name = type(module).__name__
        held: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.params = _nested({name: _copied(held[name]) for name in trained})
        self.buffers = _nested({name: _copied(held[name]) for name in (*frozen, *buffers)})
        self._param_names, self._buffer_names = _names(trained), _names([*frozen, *buffers])
        self._writable = frozenset(buffers)
        self._dtypes = {name: held[name].dtype for name in trained}
        self._frozen = frozenset(frozen)
        self._skeleton, self._placeholders = _hollow(module)
        self._idle: dict[bool, list[nn.Module]] = {True: [], False: []}  # by mode; each call in flight takes one

    def __repr__(self) -> str:
        return f"PureModule({self.name}, {tree.size(self.params):,} trained values, {tree.size(self.buffers):,} others)"

    def apply(
        self, params: PyTree, buffers: PyTree, *args: Any, key: torch.Tensor | None = None, train: bool = False, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """Run the module's forward on these params and buffers. Nothing that goes in is changed.

        Args:
            params: a tree like `.params`. Cast to another dtype, frozen params follow.
            buffers: a tree like `.buffers`.
            args: as the module's forward takes them.
            key: `[2]`: what the module draws (dropout) is drawn from it, as by `random.scope`.
            train: train mode or eval mode. Sub-modules that were in eval mode inside a module in train mode stay in eval mode.
            kwargs: as the module's forward takes them.

        Returns:
            (output, buffers after the call). An output class of dict kind, such as Hugging Face's, becomes an `Output`.

        Raises:
            StructureError: params or buffers differ in structure from this module's; names the path.
            ValueError: the module draws random numbers, and no key is given nor a `random.scope` active; or it writes into a param.
        """
        given = self._values(params, buffers)
        lent = {name: given[name].clone() for name in self._writable}  # the forward may write into these
        before = {name: _version(x) for name, x in lent.items()}
        values = {**given, **lent}
        module = self._borrowed(train)
        watch = _Watch(self.name, {name: x for name, x in given.items() if name not in lent}, self._may_draw(module, key, train))
        with contextlib.nullcontext() if key is None else scope(key), watch:
            output = torch.func.functional_call(module, values, args, kwargs, tie_weights=True)
        if watch.recomputes:
            _fill(module, {**given, **{name: given[name].clone() for name in lent}})
        else:
            self._idle[bool(train)].append(module)  # one that a call failed in is not used again
        # functional_call puts what the module holds afterwards into the mapping it was given
        changed = {name for name, x in lent.items() if values[name] is not x or _may_have_changed(x, before[name], train)}
        leaves, structure = tree.flatten(buffers)
        new = [values[name] if name in changed else x for name, x in zip(self._buffer_names[1], leaves, strict=True)]
        return _plain_output(output), tree.unflatten(structure, new)

    def to_module(self, params: PyTree, buffers: PyTree | None = None) -> nn.Module:
        """A module of the original class that holds copies of these values; tied weights are tied again.

        Args:
            params: a tree like `.params`, real tensors.
            buffers: a tree like `.buffers`; None takes those of the original module.

        >>> model = from_module(nn.Linear(2, 2))
        >>> model.to_module(tree.map(torch.zeros_like, model.params)).weight.sum().item()
        0.0
        """
        values = self._values(params, self.buffers if buffers is None else buffers)
        memo: dict[int, Any] = {id(x): _copied(values[name]) for name, x in self._skeleton.named_buffers()}
        for name, x in self._skeleton.named_parameters():
            memo[id(x)] = nn.Parameter(_copied(values[name]), requires_grad=x.requires_grad)
        return copy.deepcopy(self._skeleton, memo)

    # ---- what a call needs

    def _values(self, params: PyTree, buffers: PyTree) -> dict[str, torch.Tensor]:
        """Dotted name -> tensor; frozen params in the dtype that the trained ones were given in."""
        trained = _named("params", self.name, self._param_names, params)
        others = _named("buffers", self.name, self._buffer_names, buffers)
        casts = {self._dtypes[name]: x.dtype for name, x in trained.items() if x.dtype != self._dtypes[name]}
        if casts:
            others.update({name: others[name].to(casts.get(others[name].dtype)) for name in self._frozen})
        return {**trained, **others}

    def _borrowed(self, train: bool) -> nn.Module:
        """A skeleton in this mode that no other call is using."""
        with contextlib.suppress(IndexError):
            return self._idle[bool(train)].pop()
        return _in_mode(self._skeleton, self._placeholders, train)

    def _may_draw(self, module: nn.Module, key: torch.Tensor | None, train: bool) -> bool:
        """Whether there is a key that random numbers come from."""
        if key is not None or current_scope() is not None:
            return True
        drawing = _dropout(module) if train else None
        if drawing is not None:
            raise ValueError(
                f"{self.name}.apply(train=True) draws random numbers for {drawing}: pass `key=` (see ft.random), or train=False"
            )
        return False


class Output(dict[str, Any]):
    """A dict whose entries are attributes too, and a node of trees: what a module's own output class becomes.

    >>> Output(loss=1.0).loss
    1.0
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self) or 'nothing'}") from None


def _entries(output: Any) -> tuple[list[Any], tuple[str, ...], list[str]]:
    names = sorted(output)
    return [output[name] for name in names], tuple(output), names


def _from_entries(names: Any, values: Iterable[Any]) -> Output:
    """With the entries in the order they had."""
    entries = dict(zip(sorted(names), values, strict=True))
    return Output({name: entries[name] for name in names})


optree.register_pytree_node(Output, _entries, _from_entries, path_entry_type=optree.MappingEntry, namespace=tree.NAMESPACE)


def _plain_output(output: Any) -> Any:
    """Trees all the way down: mappings of other classes become an `Output`."""
    if isinstance(output, Mapping):
        entries = {name: _plain_output(x) for name, x in output.items()}
        return entries if type(output) in (dict, collections.OrderedDict, collections.defaultdict) else Output(entries)
    if type(output) in (list, tuple):
        return type(output)(_plain_output(x) for x in output)
    return output


# ---- the skeleton: the module without its values


def _hollow(module: nn.Module) -> tuple[nn.Module, list[torch.Tensor]]:
    """A copy whose params and buffers have shapes but no data, tied where they were; and all tensors in it."""
    memo: dict[int, Any] = {id(x): torch.empty_like(x, device="meta") for x in module.buffers()}
    for x in module.parameters():
        memo[id(x)] = nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=x.requires_grad)
    try:
        skeleton = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, ValueError) as error:
        raise TypeError(
            f"from_module copies what {type(module).__name__} is made of, and a part of it cannot be copied: {error}. Keep such parts "
            "(locks, files, results of a forward) out of the module, or give their class a `__deepcopy__`"
        ) from error
    return skeleton, [x for x in memo.values() if isinstance(x, torch.Tensor)]


def _in_mode(skeleton: nn.Module, placeholders: list[torch.Tensor], train: bool) -> nn.Module:
    """A copy in train or eval mode that shares the tensors: none is made, so it may happen while a function is captured."""
    module = copy.deepcopy(skeleton, {id(x): x for x in placeholders}).train(bool(train))
    if train and skeleton.training:
        for original, sub in zip(skeleton.modules(), module.modules(), strict=True):
            sub.training = original.training
    return module


def _fill(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Put values into a module for good: a backward pass will run parts of it again."""
    named = {id(x): values[name] for name, x in (*module.named_parameters(), *module.named_buffers())}
    for sub in module.modules():
        for name, x in (*sub.named_parameters(recurse=False), *sub.named_buffers(recurse=False)):
            delattr(sub, name)
            setattr(sub, name, named[id(x)])


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _dropout(module: nn.Module) -> str | None:
    """The first active dropout, in words."""
    for name, sub in module.named_modules():
        if isinstance(sub, _DROPOUTS) and sub.training and sub.p > 0:
            return f"dropout {_path(name) or '(the module itself)'} with p={sub.p}"
    return None


class _Watch(TorchDispatchMode):
    """Sees what a forward does: refuses what a pure function cannot do, and notes what a backward pass will do again."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, name: str, params: Mapping[str, torch.Tensor], may_draw: bool) -> None:
        super().__init__()
        self.name, self.may_draw = name, may_draw
        # what torch.func wraps has no storage to tell it by
        self.params = {} if transform_is_active() else {storage_identity(x): name for name, x in params.items()}
        self.around = innermost_checkpoint()
        self.recomputes = False  # whether a `torch.utils.checkpoint` (or `remat`) was inside the forward

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.may_draw and is_random(operation, args, kwargs):
            raise ValueError(f"{self.name}.apply draws random numbers ({operation}): pass `key=` (see ft.random)")
        self._check_writes(operation, args, kwargs)
        self.recomputes = self.recomputes or innermost_checkpoint() not in (None, self.around)
        return operation(*args, **kwargs)

    def _check_writes(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.params and isinstance(operation, OpOverload) and operation._schema.is_mutable):
            return
        for name in (self.params.get(storage_identity(x)) for x in written_arguments(operation, args, kwargs)):
            if name is not None:
                raise ValueError(
                    f"{self.name}'s forward writes into its param {_path(name)} ({operation}), and a pure function leaves its arguments as "
                    "they are. Turn that off (`max_norm` of an embedding, say), or make it a buffer"
                )


# ---- names


def _path(name: str) -> str:
    return name.replace(".", "/")


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> nested dicts.

    >>> _nested({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    result: dict[str, Any] = {}
    for name, value in named.items():
        *parents, last = name.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return result


def _names(names: list[str]) -> tuple[PyTree, list[str]]:
    """A tree of the names, and the names in the order of its leaves."""
    nested = _nested({name: name for name in names})
    return nested, tree.leaves(nested)


def _named(what: str, module: str, names: tuple[PyTree, list[str]], values: PyTree) -> dict[str, torch.Tensor]:
    leaves, structure = tree.flatten(values)
    if structure != tree.structure(names[0]):
        raise tree.StructureError(f"{what} do not fit {module}: {tree.mismatch(names[0], values) or 'another kind of tree'}")
    return dict(zip(names[1], leaves, strict=True))


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone()


def _version(x: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    return None if x.is_inference() or transform_is_active() else x._version


def _may_have_changed(x: torch.Tensor, version: int | None, train: bool) -> bool:
    """Whether a buffer was written to. In train mode every float one counts: batch norms write without saying so."""
    return version is None or x._version != version or (train and x.is_floating_point())
