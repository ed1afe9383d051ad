"""Normalisation, rotation and activation."""

from __future__ import annotations

import torch

from kernels.activation import silu_and_multiply
from kernels.norm import rms_norm
from kernels.rope import rotate_, rotation_table


def test_rms_norm_against_float64() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 576) * 10, torch.randn(576)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float())


def test_rms_norm_of_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(600, 576), torch.randn(576)
    whole = rms_norm(x, weight, 1e-5)
    for count in (1, 2, 3, 31, 32, 33, 511):
        assert torch.equal(rms_norm(x[:count].contiguous(), weight, 1e-5), whole[:count])


def test_rotation_turns_neighbours_by_their_angle() -> None:
    torch.manual_seed(2)
    table = rotation_table(9000, 64, 100_000.0, torch.device("cpu"))
    heads = torch.randn(2, 3, 64)
    turned = heads.clone()
    positions = torch.tensor([0, 8191])
    rotate_(turned, table[positions])
    assert torch.equal(turned[0], heads[0])
    pair = 5
    angle = torch.tensor(8191 * 100_000.0 ** (-2 * pair / 64), dtype=torch.float64)
    first, second = heads[1, :, 2 * pair].double(), heads[1, :, 2 * pair + 1].double()
    torch.testing.assert_close(
        turned[1, :, 2 * pair].double(), first * angle.cos() - second * angle.sin(), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        turned[1, :, 2 * pair + 1].double(), first * angle.sin() + second * angle.cos(), atol=1e-5, rtol=0
    )


def test_rotation_of_half_precision_is_computed_in_fp32() -> None:
    torch.manual_seed(3)
    table = rotation_table(100, 64, 10_000.0, torch.device("cpu"))[torch.tensor([7, 99])]
    heads = torch.randn(2, 4, 64).bfloat16()
    exact = heads.float()
    rotate_(exact, table)
    rotate_(heads, table)
    assert torch.equal(heads, exact.bfloat16())


def test_silu_and_multiply() -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(3, 2 * 48)
    before = gate_up.clone()
    gate, up = gate_up[:, :48], gate_up[:, 48:]
    torch.testing.assert_close(silu_and_multiply(gate_up), gate / (1 + torch.exp(-gate)) * up)
    assert torch.equal(gate_up, before)
