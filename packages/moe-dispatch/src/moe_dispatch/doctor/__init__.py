"""What works on this machine: ``moe-dispatch doctor``."""

from moe_dispatch.doctor.versions import Part, check_versions, device_part, host_part

__all__ = ["Part", "check_versions", "device_part", "host_part"]
