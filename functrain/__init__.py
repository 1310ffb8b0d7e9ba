"""Functional training on PyTorch: a training step is a pure function over pytrees of sharded state."""

from functrain import tree as tree
from functrain.tree import Mean as Mean
from functrain.tree import field as field
from functrain.tree import struct as struct
