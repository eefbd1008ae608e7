"""AdamW on flat slices, with clipping and skipping inside."""

from moe_parallel.adamw.config import AdamWConfig

__all__ = ["AdamWConfig"]
