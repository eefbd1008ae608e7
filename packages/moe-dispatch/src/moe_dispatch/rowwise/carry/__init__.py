"""Kernels that carry rows between ranks and sum what comes back."""
