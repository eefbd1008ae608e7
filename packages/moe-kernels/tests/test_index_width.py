"""Offsets into memory are 64 bits wide: rows times columns may pass 2**31."""

import ast
from pathlib import Path

import moe_kernels
import pytest
import torch
from moe_kernels.config import Config
from moe_kernels.gemm.kernel import grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.mxfp8 import quantize_both
from moe_kernels.mxfp8.columns_kernel import quantize_both_triton
from moe_kernels.mxfp8.rows_kernel import quantize_triton
from moe_kernels.testing import randn

SOURCES = Path(moe_kernels.__file__).parent
KERNELS = sorted([*SOURCES.rglob("*kernel.py"), *SOURCES.rglob("encode.py")])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(block_n=16, block_f=16, block_d=16, num_warps=4, num_stages=1)


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def is_pointer(node: ast.AST) -> bool:
    return any(name.endswith(("_ptr", "_ptrs")) for name in names_in(node))


def narrow_products(source: str) -> list[str]:
    """Return the products in pointer arithmetic none of whose factors was widened.

    A name is wide if it is assigned from an expression that says ``.to(tl.int64)``. A product with
    a constant block size is a step within one tile, and small.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        wide = {
            target.id
            for node in assigns
            if ".to(tl.int64)" in ast.unparse(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Add):
                continue
            if not is_pointer(node):
                continue
            for product in ast.walk(node):
                if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                    names = names_in(product)
                    if not names & wide and not any(
                        name.isupper() for name in names if "_" in name
                    ):
                        found.append(ast.unparse(product))
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_kernel_multiplies_32_bit_indices_into_a_pointer(path) -> None:
    assert narrow_products(path.read_text()) == []


def test_the_scan_finds_a_product_that_was_not_widened() -> None:
    bad = """
def kernel(x_ptr, stride):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    wide = n.to(tl.int64)
    tl.load(x_ptr + wide * stride)
    tl.load(x_ptr + n[:, None] * stride)
"""
    assert narrow_products(bad) == ["n[:, None] * stride"]


def run(kernel, *args: torch.Tensor) -> torch.Tensor:
    return kernel(*(t.to(DEVICE) for t in args), config=SMALL).cpu()


def test_rows_past_two_to_the_31st_element_are_found() -> None:
    # Rows 2**30 elements apart: row 2 begins where 32 bits end. Only touched pages cost memory.
    D, F, stride = 16, 16, 2**30
    values_ND, dy_NF = randn(3, D, seed=0), randn(3, F, seed=1)
    w_EFD, offsets_E1 = randn(1, F, D, seed=2), torch.tensor([0, 3], dtype=torch.int32)
    x_ND = torch.empty(2 * stride + D, device=DEVICE).as_strided((3, D), (stride, 1))
    x_ND.copy_(values_ND)
    got = run(grouped_mm_triton, x_ND, w_EFD, offsets_E1)
    torch.testing.assert_close(got, values_ND @ w_EFD[0].T)
    got = run(grouped_mm_dw_triton, x_ND, dy_NF, offsets_E1)
    torch.testing.assert_close(got[0], dy_NF.T @ values_ND)


@pytest.mark.parametrize("recipe", ["mx32", "mxrow"])
def test_rows_past_two_to_the_31st_element_are_quantized(recipe) -> None:
    stride, values_ND = 2**30, randn(3, 32, seed=0)
    x_ND = torch.empty(2 * stride + 32, device=DEVICE).as_strided((3, 32), (stride, 1))
    x_ND.copy_(values_ND)
    offsets_E1 = torch.tensor([0, 1, 3], dtype=torch.int32)
    got = [
        *quantize_both_triton(x_ND, recipe, "rceil", offsets_E1.to(DEVICE)),
        *quantize_triton(x_ND, recipe, "rceil"),
    ]
    rows, columns = quantize_both(values_ND, recipe=recipe, offsets_E1=offsets_E1)
    for part, want in zip(got, (*rows, *columns, *rows), strict=True):
        assert torch.equal(part.cpu(), want.view(torch.uint8))


def test_experts_past_two_to_the_31st_element_are_found() -> None:
    D, F, stride = 16, 16, 2**30
    values_EFD = randn(3, F, D, seed=0)
    w_EFD = torch.empty(2 * stride + F * D, device=DEVICE).as_strided((3, F, D), (stride, D, 1))
    w_EFD.copy_(values_EFD)
    x_ND, offsets_E1 = randn(3, D, seed=1), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    got = run(grouped_mm_triton, x_ND, w_EFD, offsets_E1)
    torch.testing.assert_close(got, torch.einsum("nd,nfd->nf", x_ND, values_EFD))
