"""Reference models as pure functions over params."""

from functrain.models import gpt as gpt
