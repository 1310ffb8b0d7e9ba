"""Losses as `Mean(total, weight)`: sums that parts of a batch can be merged from exactly, whatever each part's count.

All are computed in float32 (float64 where the inputs are), whatever dtype the model computes in.
"""

from functrain.losses.classes import cross_entropy as cross_entropy
from functrain.losses.elementwise import binary_cross_entropy as binary_cross_entropy
from functrain.losses.elementwise import mean_squared_error as mean_squared_error
from functrain.losses.linear import linear_cross_entropy as linear_cross_entropy
