"""Keep what backward needs without room for rows that never came."""

from moe_dispatch.arena.rows import RowArena

__all__ = ["RowArena"]
