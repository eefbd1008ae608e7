"""MXFP8: float8 values in blocks of 32 that share a power-of-two scale."""

from moe_kernels.mxfp8.check import BLOCK
from moe_kernels.mxfp8.reference import MXTensor, decode_scale, dequantize, quantize

__all__ = ["BLOCK", "MXTensor", "decode_scale", "dequantize", "quantize"]
