"""Tools for runs that hang, drift apart or are slow."""

from moe_parallel.diagnostics.desync import find_desync
from moe_parallel.diagnostics.heartbeat import Beat, Heartbeat
from moe_parallel.diagnostics.stragglers import StragglerMonitor, StragglerReport

__all__ = ["Beat", "Heartbeat", "StragglerMonitor", "StragglerReport", "find_desync"]
