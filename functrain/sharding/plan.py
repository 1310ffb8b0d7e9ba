"""`Plan`: where every leaf of a step lives, as plain data: a mesh, rules for params, ZeRO presets, and the spec of the batch."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functrain import tree
from functrain.sharding.mesh import Mesh, make_mesh
from functrain.sharding.rules import Rules
from functrain.sharding.spec import P, Sharding
from functrain.sharding.zero import Zero, zero
from functrain.tree import PyTree


@dataclass(frozen=True, init=False)
class Plan:
    """Where the leaves of a step's arguments and results live.

    A leaf's role is told by its path: below `params` it is a param, below `opt_state` it belongs to the optimizer. An argument that holds
    neither is a batch.

    >>> mesh = make_mesh({"data": 2}, simulate=True)
    >>> plan = Plan(mesh, zero(3, min_size=0), batch=P("data"))
    >>> plan.layout({"params": {"w": (4, 3)}, "step": ()}).spec("params/w", (4, 3))
    P('data')
    """

    mesh: Mesh
    rules: tuple[Rules, ...]
    zeros: tuple[Zero, ...]
    batch: P | Mapping[str, P]
    constraints: Mapping[str, P]  # specs of named activations
    params_name: str
    opt_state_names: tuple[str, ...]

    def __init__(
        self,
        mesh: Mesh,
        *rules: Rules | Zero,
        batch: P | Mapping[str, P] | None = None,
        activations: Mapping[str, P] | None = None,
        params: str = "params",
        opt_state: str | Sequence[str] = "opt_state",
        offload: None = None,
        memory: None = None,
    ) -> None:
        """Put a plan together.

        Args:
            mesh: the ranks.
            rules: `Rules` and `zero(...)` presets; of each kind the first that matches a leaf decides.
            batch: the spec of every leaf with a dimension in arguments that hold no state (random keys are never split), or path pattern
                -> spec for paths that begin with the argument's name.
            activations: name -> spec for values named by `with_sharding_constraint(x, "name")`.
            params: the component of a path below which the params are.
            opt_state: the component, or several, below which the optimizer's leaves are.
            offload: not available yet.
            memory: not available yet.

        Raises:
            ValueError: a spec names an axis that the mesh lacks.
            NotImplementedError: `offload` or `memory` is given.
        """
        for name, value in (("offload", offload), ("memory", memory)):
            if value is not None:
                raise NotImplementedError(f"Plan({name}=...) is not available yet: leave it out")
        for rule in rules:
            if not isinstance(rule, (Rules, Zero)):
                raise TypeError(f"a plan takes ft.Rules(...) and ft.zero(...), not {rule!r}")
        put = object.__setattr__
        put(self, "mesh", mesh)
        put(self, "rules", tuple(rule for rule in rules if isinstance(rule, Rules)))
        put(self, "zeros", tuple(rule for rule in rules if isinstance(rule, Zero)))
        put(self, "batch", P() if batch is None else batch if isinstance(batch, P) else dict(batch))
        put(self, "constraints", dict(activations or {}))
        put(self, "params_name", params)
        put(self, "opt_state_names", (opt_state,) if isinstance(opt_state, str) else tuple(opt_state))
        specs = [spec for rule in self.rules for spec in rule.table.values()] + list(self.constraints.values())
        specs += [self.batch] if isinstance(self.batch, P) else list(self.batch.values())
        for spec in specs:
            Sharding(mesh, spec)
        for one in self.zeros:
            for axis in one.axes:
                mesh.size(axis)

    def layout(self, leaves: PyTree, paths: Sequence[str] | None = None) -> "Layout":
        """The plan for one tree of leaves (tensors, abstract leaves or shapes)."""
        named = tree.leaves_with_path(leaves, is_leaf=_is_shape)
        pairs = named if paths is None else list(zip(paths, leaves, strict=True))
        return Layout(self, {path: tuple(getattr(leaf, "shape", leaf)) for path, leaf in pairs if _has_shape(leaf)})

    def explain(self, state: PyTree) -> str:
        """A table of every leaf: shape, spec, tier, bytes a rank; and totals by role. Nothing is computed; leaves may be abstract."""
        layout = self.layout(state)
        rows, totals = [], dict[str, list[int]]()
        for path, leaf in tree.leaves_with_path(state):
            if not _has_shape(leaf):
                continue
            sharding = Sharding(self.mesh, layout.spec(path, leaf.shape))
            here = leaf.dtype.itemsize
            for n in sharding.shard_shape(leaf.shape):
                here *= n
            whole = leaf.dtype.itemsize * _numel(leaf.shape)
            rows.append((path, "x".join(map(str, leaf.shape)) or "scalar", str(sharding.spec), sharding.tier, f"{here:,}"))
            total = totals.setdefault(layout.role(path), [0, 0])
            total[0] += here
            total[1] += whole
        head = ("leaf", "shape", "spec", "tier", "bytes a rank")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(5)]
        lines = [
            "  ".join(cell.rjust(w) if i == 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in [head, *rows]
        ]
        lines += [f"total {role}: {here:,} bytes a rank of {whole:,}" for role, (here, whole) in totals.items()]
        return "\n".join([f"mesh {self.mesh}", *lines])

    # ---- plain data

    def to_plain(self) -> dict[str, Any]:
        """Everything but the ranks themselves, as plain data."""
        batch = self.batch.to_plain() if isinstance(self.batch, P) else {k: v.to_plain() for k, v in self.batch.items()}
        return {
            "mesh": self.mesh.shape,
            "batch": batch,
            "zero": [one.to_plain() for one in self.zeros],
            "rules": [{"path": pattern, "spec": spec.to_plain()} for rule in self.rules for pattern, spec in rule.table.items()],
            "activations": {name: spec.to_plain() for name, spec in self.constraints.items()},
            "params": self.params_name,
            "opt_state": list(self.opt_state_names),
        }

    def to_toml(self) -> str:
        """The plan as TOML, which `Plan.of_toml` reads."""
        plain = self.to_plain()
        lines = [f"{key} = {_toml(plain[key])}" for key in ("mesh", "batch", "params", "opt_state", "activations")]
        for table in ("zero", "rules"):
            for row in plain[table]:
                lines += [f"\n[[{table}]]", *(f"{key} = {_toml(value)}" for key, value in row.items())]
        return "\n".join(lines) + "\n"

    @staticmethod
    def of_toml(text: str, mesh: Mesh | None = None, **options: Any) -> "Plan":
        """Read a plan.

        Args:
            text: TOML such as `to_toml` writes; `mesh` is the only key that is needed.
            mesh: the ranks; None makes the mesh that the text names.
            options: for `make_mesh`, such as `simulate=True`.

        Raises:
            ValueError: the text is no TOML, a key is unknown, or the mesh is not that of the text.

        >>> plan = Plan.of_toml('mesh = {data = 2}\\nbatch = ["data"]\\n[[zero]]\\nstage = 3', simulate=True)
        >>> plan.zeros[0].stage, plan.batch
        (3, P('data'))
        """
        try:
            plain = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"the plan is no TOML: {error}") from None
        known = {"mesh", "batch", "zero", "rules", "activations", "params", "opt_state"}
        for key in plain.keys() - known:
            raise ValueError(f"a plan has no key {key!r}; its keys are {', '.join(sorted(known))}")
        if "mesh" not in plain:
            raise ValueError("a plan needs a mesh, for instance: mesh = {data = 2}")
        if mesh is None:
            mesh = make_mesh(plain["mesh"], **options)
        elif mesh.axis_names != tuple(plain["mesh"]):
            raise ValueError(f"the plan is for the mesh axes {', '.join(plain['mesh'])}, not {', '.join(mesh.axis_names)}")
        try:
            presets = [zero(**row) for row in plain.get("zero", [])]
            rules = [Rules({row["path"]: P.of_plain(row["spec"]) for row in plain["rules"]})] if plain.get("rules") else []
        except (TypeError, KeyError) as error:
            raise ValueError(f"a zero or rules table of the plan is wrong: {error}") from None
        batch = plain.get("batch", [])
        return Plan(
            mesh,
            *rules,
            *presets,
            batch={k: P.of_plain(v) for k, v in batch.items()} if isinstance(batch, dict) else P.of_plain(batch),
            activations={k: P.of_plain(v) for k, v in plain.get("activations", {}).items()},
            params=plain.get("params", "params"),
            opt_state=plain.get("opt_state", "opt_state"),
        )


class Layout:
    """A plan applied to the leaves of one tree: the spec of each leaf in each of its roles."""

    def __init__(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.plan = plan
        self.shapes = {self.state_path(path): shape for path, shape in shapes.items()}
        head = f"{plan.params_name}/"
        self._params = {path.removeprefix(head): shape for path, shape in self.shapes.items() if path.startswith(head)}
        self._check_patterns()

    def _check_patterns(self) -> None:
        paths = [path for path in self.shapes if self.role(path) != "other"] or list(self.shapes)
        if not self._params:
            return
        for rules in self.plan.rules:
            rules.check([*paths, *self.shapes])
        below = list(self._params)
        subtrees = list(
            {"/".join(parts[:depth]): None for parts in (path.split("/") for path in below) for depth in range(1, len(parts) + 1)}
        )
        for one in self.plan.zeros:
            tree.check_patterns([one.only] if one.only != "**" else [], below)
            tree.check_patterns(one.groups, subtrees)
        for path, shape in self.shapes.items():
            Sharding(self.plan.mesh, self.spec(path, shape)).check(shape, path)

    def state_path(self, path: str) -> str:
        """A path without what stands before `params` or `opt_state`, such as the argument's name."""
        parts = path.split("/")
        roots = (self.plan.params_name, *self.plan.opt_state_names)
        first = next((i for i, part in enumerate(parts) if part in roots), 0)
        return "/".join(parts[first:])

    def role(self, path: str) -> str:
        """One of "params", "opt_state" and "other"."""
        root = self.state_path(path).partition("/")[0]
        if root == self.plan.params_name:
            return "params"
        return "opt_state" if root in self.plan.opt_state_names else "other"

    def spec(self, path: str, shape: Sequence[int]) -> P:
        """Where a leaf rests between steps."""
        path, role = self.state_path(path), self.role(path)
        if role == "params":
            return self._stored(path.partition("/")[2], shape, 3)
        found = self._rule(path)
        if found is not None or role == "other":
            return found or P()
        owner = self._owner(path)
        if owner is None:
            return P()
        if self._params[owner] == tuple(shape):
            return self._stored(owner, shape, 1)
        preset = self._preset(owner)  # a statistic of another shape, such as a factored moment: split on its own
        return preset.split(P(), shape, self.plan.mesh) if preset and preset.stage >= 1 else P()

    def owner(self, path: str) -> str | None:
        """The param (its path below the params) that a leaf is, or is optimizer state of."""
        path = self.state_path(path)
        return path.partition("/")[2] if self.role(path) == "params" else self._owner(path) if self.role(path) == "opt_state" else None

    def used(self, path: str) -> P:
        """How a param is split while the step computes with it."""
        return self._base(self.state_path(path).partition("/")[2])

    def gradient(self, path: str, shape: Sequence[int]) -> P:
        """How a param's gradient is split."""
        return self._stored(self.state_path(path).partition("/")[2], shape, 2)

    def group(self, path: str) -> str | None:
        """The sub-tree with which a param is gathered and reduced as one unit, or None."""
        name = self.state_path(path).partition("/")[2]
        parts = name.split("/")
        for preset in self.plan.zeros:
            for pattern in preset.groups:
                for depth in range(len(parts), 0, -1):
                    if tree.matches(pattern, "/".join(parts[:depth])):
                        return "/".join(parts[:depth])
        return None

    def bucket_bytes(self, path: str) -> int:
        """Up to how many bytes a param is gathered and reduced together with its neighbours."""
        preset = self._preset(self.state_path(path).partition("/")[2])
        return preset.bucket_bytes if preset else 0

    def _stored(self, name: str, shape: Sequence[int], from_stage: int) -> P:
        base, preset = self._base(name), self._preset(name)
        return preset.split(base, shape, self.plan.mesh) if preset and preset.stage >= from_stage else base

    def _base(self, name: str) -> P:
        return self._rule(f"{self.plan.params_name}/{name}") or P()

    def _rule(self, path: str) -> P | None:
        return next((spec for rules in self.plan.rules if (spec := rules.spec(path)) is not None), None)

    def _preset(self, name: str) -> Zero | None:
        return next((one for one in self.plan.zeros if one.covers(name)), None)

    def _owner(self, path: str) -> str | None:
        """The param that an optimizer's leaf belongs to: the longest one whose path ends its path."""
        parts = path.split("/")
        return next(("/".join(parts[i:]) for i in range(1, len(parts)) if "/".join(parts[i:]) in self._params), None)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape") or _is_shape(leaf)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
