"""No clipping: a token's value is the sum of its entries."""

from __future__ import annotations

from opsd.clipping.base import Clipping
from opsd.registry import register


@register("clipping", "none")
class NoClipping(Clipping):
    pass
