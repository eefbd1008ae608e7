"""What a value must be, said with the value when it is not."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive(**values: float) -> None:
    for name, value in values.items():
        require(value > 0 and is_finite(value), f"{name} must be positive, got {value}")


def require_no_less_than_zero(**values: float) -> None:
    for name, value in values.items():
        require(value >= 0 and is_finite(value), f"{name} must be 0 or more, got {value}")


def is_text(name: str) -> bool:
    return name.encode(errors="surrogateescape") == name.encode(errors="replace")


def is_finite(value: float) -> bool:
    return -1e18 < value < 1e18  # beyond, whole numbers no longer fit into 64 bits
