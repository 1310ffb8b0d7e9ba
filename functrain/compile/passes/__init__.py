"""Graph passes, each a file: a pure function graph -> graph with a name and a report."""

from functrain.compile.passes.base import Pass, PassReport, run_passes
from functrain.compile.passes.cleanup import cleanup
from functrain.compile.passes.donate import donate
from functrain.compile.passes.early_updates import early_updates
from functrain.compile.passes.fuse_adamw import fuse_adamw
from functrain.compile.passes.merge_equal import merge_equal
from functrain.compile.passes.own_outputs import own_outputs
from functrain.compile.passes.reuse import reuse_buffers

__all__ = [
    "Pass",
    "PassReport",
    "cleanup",
    "donate",
    "early_updates",
    "fuse_adamw",
    "merge_equal",
    "own_outputs",
    "reuse_buffers",
    "run_passes",
]
