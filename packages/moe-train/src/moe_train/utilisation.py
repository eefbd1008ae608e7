"""How much of a device a run uses."""

import torch

from moe_train.config import RunConfig
from moe_train.flops import train_flops_per_token

# Dense bfloat16 products with float32 sums, FLOP/s, from data sheets; the longest name that fits
# a device's counts.
_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "GB300": 2500e12,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device by its name, in FLOP/s, or None where it is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it.
        dtype: Of the products, as ``train.dtype``. Only that of bfloat16 is known.

    Examples:
        >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("NVIDIA H200", "float32")
        (989400000000000.0, None)
        >>> peak_flops("NVIDIA H100 PCIe", "bfloat16")
        756000000000000.0
    """
    fitting = [name for name in _BF16 if name in device_name]
    if dtype != "bfloat16" or not fitting:
        return None
    return _BF16[max(fitting, key=len)]


class Utilisation:
    """From tokens a second to FLOPs.

    Counts the FLOPs of the model, forward and backward, by `moe_train.flops`. What is computed
    again to save memory, and the optimizer, are time and no FLOPs.

    Args:
        config: The run.
        device: Of this rank; all others have the same.
        num_devices: Ranks.
    """

    def __init__(self, config: RunConfig, device: torch.device, num_devices: int):
        per_token = train_flops_per_token(config.model, config.data.sequence_length)
        self._per_device = per_token / num_devices
        # How much attention whole documents in a row need depends on their lengths.
        self._known = config.data.packing == "stream"
        self._peak = None
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self._peak = peak_flops(name, config.train.dtype)

    def of(self, tokens_per_second: float) -> dict[str, float]:
        """Return ``tflops``, 10^12 FLOPs a second and device, and ``mfu`` where a peak is known.

        Nothing where rows hold whole documents: by the length of a row it would be too much.

        Args:
            tokens_per_second: Of all ranks.
        """
        if not self._known:
            return {}
        flops = tokens_per_second * self._per_device
        rate = {"tflops": float(f"{flops / 1e12:.6g}")}
        return rate if self._peak is None else rate | {"mfu": float(f"{flops / self._peak:.6g}")}
