"""Peers whose memory cannot be mapped, reached through NVSHMEM's device calls."""

from moe_dispatch.rowwise.remote.calls import Remote

__all__ = ["Remote"]
