"""Routing, grouped GEMM, expert MLP and MXFP8 for Mixture-of-Experts layers."""
