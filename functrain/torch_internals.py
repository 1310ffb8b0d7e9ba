"""Every use of a part of torch that is not public, in one place, each with its reason and the public way that falls short."""

from torch.fx.traceback import annotate as annotate

# `torch.fx.traceback.annotate(mapping)`: a context manager whose mapping is attached to graph nodes made inside it. torch.fx.traceback is
# documented as experimental. Transforms mark forward and backward with it, capture reads it. Fallback: a ContextVar of our own.
