"""Random numbers as functions of a key: the draws of `jax.random`, bit for bit, on torch tensors.

A key is an int64 tensor `[2]` of two 32-bit words, a leaf like any other. Nothing is drawn from hidden state: a key used twice gives the
same numbers twice, and an element of a draw depends on the key and on its row-major index in the draw, never on device, rank or order.

The cipher is Threefry-2x32 in JAX's partitionable layout (JAX's default), so keys, bits, uniform and Bernoulli values, integers and
permutations equal `jax.random`'s exactly, normal values to 1e-6 in float32. Results live on the key's device.

A function takes one key, as JAX's do; for many, `split` one and map the function over the rows:

>>> import torch
>>> keys = split(key(0), 3)
>>> torch.vmap(lambda k: normal(k, (2,)))(keys).shape
torch.Size([3, 2])
"""

from functrain.random.draws import bernoulli as bernoulli
from functrain.random.draws import bits as bits
from functrain.random.draws import categorical as categorical
from functrain.random.draws import dropout as dropout
from functrain.random.draws import exponential as exponential
from functrain.random.draws import gumbel as gumbel
from functrain.random.draws import normal as normal
from functrain.random.draws import permutation as permutation
from functrain.random.draws import randint as randint
from functrain.random.draws import truncated_normal as truncated_normal
from functrain.random.draws import uniform as uniform
from functrain.random.keys import fold_in as fold_in
from functrain.random.keys import key as key
from functrain.random.keys import split as split
from functrain.random.scoping import checkpoint_contexts as checkpoint_contexts
from functrain.random.scoping import scope as scope
