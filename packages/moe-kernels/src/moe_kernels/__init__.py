"""Routing, grouped GEMM, expert MLP and MXFP8 for Mixture-of-Experts layers.

An operation with a kernel is a folder of small files, to be read in this order:

- ``reference.py``: what it computes, in plain torch. It is the specification.
- ``kernel.py``: how the GPU computes it, in Triton.
- ``op.py``: the ``torch.library`` operator that ties the two together and differentiates.
- ``check.py``: what the arguments must be.
- ``__init__.py``: the public function.

Shapes are written as a suffix of the name, so ``x_ND`` has two axes, N and D:

====  =====================================================================
T     tokens on this rank
K     experts chosen for each token (top-k)
N     routed rows, one for each (token, expert) pair: N = T*K
R     rows that this rank's experts received
E     experts (``E1``: E + 1 entries)
D     model dimension
F     hidden dimension of one expert
G     gate and up projection side by side: G = 2*F
B     blocks of 32 values that have one MXFP8 scale
P     rows as columns in MXFP8, each group filled up to a multiple of 128
====  =====================================================================
"""

from moe_kernels.backend import Backend, backend
from moe_kernels.gemm import grouped_mm, grouped_mm_dw
from moe_kernels.mlp import expert_mlp, grouped_mlp
from moe_kernels.mxfp8 import (
    MXTensor,
    dequantize,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_dswiglu,
    quantize_routed,
    quantize_swiglu,
)
from moe_kernels.mxgemm import scaled_grouped_mm
from moe_kernels.mxmlp import (
    MXWeight,
    StaleWeightError,
    WeightCache,
    mx_linear,
    quantize_weight,
)
from moe_kernels.routing import (
    Groups,
    Routing,
    Unevenness,
    balance_loss,
    count_experts,
    distance_loss,
    group_rows,
    route,
    route_to,
    unevenness,
    update_bias,
    z_loss,
)

__all__ = [
    "Backend",
    "Groups",
    "MXTensor",
    "MXWeight",
    "Routing",
    "StaleWeightError",
    "Unevenness",
    "WeightCache",
    "backend",
    "balance_loss",
    "count_experts",
    "dequantize",
    "distance_loss",
    "expert_mlp",
    "group_rows",
    "grouped_mlp",
    "grouped_mm",
    "grouped_mm_dw",
    "mx_linear",
    "quantize",
    "quantize_both",
    "quantize_columns",
    "quantize_dswiglu",
    "quantize_routed",
    "quantize_swiglu",
    "quantize_weight",
    "route",
    "route_to",
    "scaled_grouped_mm",
    "unevenness",
    "update_bias",
    "z_loss",
]
