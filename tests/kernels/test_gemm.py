from __future__ import annotations

import pytest
import torch

from kernels.gemm import AffineWeight, CPUWeight, dequantize, linear, pack, pack_affine

SHAPES = [(192, 576), (960, 576), (3072, 576), (576, 1536), (5000, 320)]
"""Below and above the size that decides between the two libraries, and with long columns."""


@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_right(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(7, shape[1])
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(linear(x, pack(weight)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    packed, x = pack(torch.randn(shape)), torch.randn(300, shape[1])
    whole = linear(x, packed)
    for count in [*range(1, 35), 63, 64, 65, 128, 257]:
        assert torch.equal(linear(x[:count].contiguous(), packed), whole[:count]), count
    assert torch.equal(linear(x[77:78].contiguous(), packed), whole[77:78])


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_both_libraries_multiply_alike(library: str) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(640, 512), torch.randn(3, 512)
    torch.testing.assert_close(CPUWeight(library, weight).multiply(x), x @ weight.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("bits", "zero_point", "offset"), [(4, 0, True), (4, 8, False), (8, 128, False), (8, 0, True)])
def test_dequantize_against_plain_arithmetic(bits: int, zero_point: int, offset: bool) -> None:
    rows, groups, size = 3, 2, 8
    codes = torch.randint(0, 2**bits, (rows, groups, size), generator=torch.Generator().manual_seed(3))
    scale = torch.rand(rows, groups, dtype=torch.float16)
    minimum = torch.randn(rows, groups).half() if offset else None
    packed = codes.to(torch.uint8)
    if bits == 4:
        packed = packed[:, :, : size // 2] | (packed[:, :, size // 2 :] << 4)
    expected = (codes - zero_point) * scale.float().unsqueeze(-1)
    if minimum is not None:
        expected = expected + minimum.float().unsqueeze(-1)
    result = dequantize(packed.reshape(rows, -1), scale, minimum, zero_point=zero_point, bits=bits, dtype=torch.float32)
    assert torch.equal(result, expected.reshape(rows, -1))


def test_a_weight_that_stays_quantised_multiplies_like_the_expanded_one() -> None:
    torch.manual_seed(4)
    codes, scale = torch.randint(0, 256, (64, 16), dtype=torch.uint8), torch.rand(64, 1)
    weight = AffineWeight(codes, scale, None, 8, 4, torch.float32)
    assert (weight.rows, weight.columns) == (64, 32)
    x = torch.randn(5, 32)
    packed = pack_affine(codes, scale, None, zero_point=8, bits=4, dtype=torch.float32)
    torch.testing.assert_close(linear(x, weight), linear(x, packed))


def test_other_bit_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bits"):
        dequantize(
            torch.zeros(1, 4, dtype=torch.uint8), torch.ones(1, 1), None, zero_point=0, bits=3, dtype=torch.float32
        )
