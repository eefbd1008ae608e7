"""Routing: which experts see which token, in what order, and how evenly."""

from moe_kernels.routing.balance import balance_loss, count_experts, update_bias, z_loss
from moe_kernels.routing.choice import Routing, route, route_to
from moe_kernels.routing.distance import Unevenness, distance_loss, unevenness
from moe_kernels.routing.groups import Groups, group_rows
from moe_kernels.routing.tiles import Tiles, group_rows_and_tiles, tile_rows

__all__ = [
    "Groups",
    "Routing",
    "Tiles",
    "Unevenness",
    "balance_loss",
    "count_experts",
    "distance_loss",
    "group_rows",
    "group_rows_and_tiles",
    "route",
    "route_to",
    "tile_rows",
    "unevenness",
    "update_bias",
    "z_loss",
]
