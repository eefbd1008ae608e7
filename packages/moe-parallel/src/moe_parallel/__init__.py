"""Mesh, sharded optimizer and gradient reduction for MoE training."""
