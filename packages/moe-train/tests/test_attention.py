import torch
from moe_train.rotary import rotations


def test_positions_of_a_bfloat16_model_have_the_angles_of_float32() -> None:
    wide = rotations(5000, 8, 10_000.0, torch.zeros(1))
    assert torch.equal(rotations(5000, 8, 10_000.0, torch.zeros(1, dtype=torch.bfloat16)), wide)
    # In bfloat16 the slowest of these pairs has one cosine for dozens of neighbouring positions.
    assert wide.unique(dim=0).shape[0] == 5000
