"""Functional training on PyTorch: a training step is a pure function over trees of tensors.

This file is the table of contents.
"""

# Trees, and values that live in them
from functrain import tree as tree
from functrain import random as random
from functrain import sharding as sharding
from functrain.tree import Mean as Mean
from functrain.tree import field as field
from functrain.tree import struct as struct

# Transformations of functions
from functrain.transforms import grad as grad
from functrain.transforms import value_and_grad as value_and_grad
from functrain.transforms import unshard as unshard
from functrain.transforms import jvp as jvp
from functrain.transforms import vjp as vjp
from functrain.batching import vmap as vmap
from functrain.accumulate import accumulate as accumulate
from functrain.remat import remat as remat
from functrain.remat import remat_policies as remat_policies
from functrain.tiled import tiled as tiled

# Modules, losses, layers, optimizers
from functrain import layers as layers
from functrain import losses as losses
from functrain import optim as optim
from functrain.module import from_module as from_module

# Precision and state
from functrain.precision import DynamicScale as DynamicScale
from functrain.precision import Precision as Precision
from functrain.precision import StaticScale as StaticScale
from functrain.precision import all_finite as all_finite
from functrain.state import TrainState as TrainState

# Meshes, specs and plans
from functrain.sharding import Array as Array
from functrain.sharding import P as P
from functrain.sharding import Plan as Plan
from functrain.sharding import Rules as Rules
from functrain.sharding import Sharding as Sharding
from functrain.sharding import from_local as from_local
from functrain.sharding import make_mesh as make_mesh
from functrain.sharding import zero as zero

# Capture and compilation
from functrain.compile.abstract import ShapeDtypeStruct as ShapeDtypeStruct
from functrain.compile.abstract import eval_shape as eval_shape
from functrain.compile.errors import CaptureError as CaptureError
from functrain.compile.errors import DonatedError as DonatedError
from functrain.compile.constraint import with_sharding_constraint as with_sharding_constraint
from functrain.compile.jitted import disable_jit as disable_jit
from functrain.compile.jit import jit as jit
from functrain.compile.place import device_put as device_put
from functrain.compile.place import init as init

# One rank's view: functions of local shards, and collectives for them
from functrain.compile import lax as lax
from functrain.compile.shard_map import shard_map as shard_map

# Processes
from functrain.launch import LaunchError as LaunchError
from functrain.launch import current_device_name as current_device_name
from functrain.launch import launch as launch
from functrain.launch import print_dist as print_dist
from functrain.launch import rank_logging as rank_logging
