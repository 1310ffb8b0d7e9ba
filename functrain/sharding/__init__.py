"""Where leaves live: meshes, specs, arrays, rules, ZeRO presets and plans."""

from functrain.sharding.array import Array, ArrayLayout, from_local, place, register_runner
from functrain.sharding.mesh import Mesh, make_mesh
from functrain.sharding.plan import Layout, Plan
from functrain.sharding.rules import Rules
from functrain.sharding.spec import P, Sharding
from functrain.sharding.zero import Zero, zero

__all__ = [
    "Array",
    "ArrayLayout",
    "Layout",
    "Mesh",
    "P",
    "Plan",
    "Rules",
    "Sharding",
    "Zero",
    "from_local",
    "make_mesh",
    "place",
    "register_runner",
    "zero",
]
