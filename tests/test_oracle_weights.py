"""Real pretrained weights against an independent float64 forward pass."""

from pathlib import Path

import numpy as np
import torch
from torch.testing import assert_close

from attnscope.hooks.listen import listen
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions


def test_weights_agree_with_an_independent_oracle(real_model_folder: Path) -> None:
    oracle = np.load(real_model_folder / "oracle.npz")
    loaded = load(LoadOptions(model=str(real_model_folder)))
    expected_LHQK = torch.from_numpy(oracle["attentions"])
    heard = {}
    ids_BT = torch.from_numpy(oracle["ids"])[None]
    listen(loaded.model, ids_BT, lambda call: heard.update({call.layer: call.weights_BHQK[0]}))
    assert sorted(heard) == list(range(len(expected_LHQK)))
    for layer, weights_HQK in heard.items():
        assert_close(weights_HQK, expected_LHQK[layer], atol=5e-5, rtol=0)
        assert_close(weights_HQK.flip(0), expected_LHQK[layer].flip(0), atol=5e-5, rtol=0)
    wrong = heard[0][[1, 0, *range(2, len(heard[0]))]]  # two heads swapped must not pass
    assert (wrong - expected_LHQK[0]).abs().max() > 5e-3
