"""Kernels by which ranks agree: signals, waits, counts, places."""
