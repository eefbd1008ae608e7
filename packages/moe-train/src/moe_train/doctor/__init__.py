"""What this machine can do, and what it lacks. Each question is a function that changes nothing."""

from moe_train.doctor.finding import BAD, GOOD, LACKS, Finding
from moe_train.doctor.hardware import hardware
from moe_train.doctor.software import exchanges, extras, software
from moe_train.doctor.system import system

__all__ = [
    "BAD",
    "GOOD",
    "LACKS",
    "Finding",
    "exchanges",
    "extras",
    "hardware",
    "software",
    "system",
]
