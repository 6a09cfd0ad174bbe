"""The twin's objective: T targets a window, shifted by one, nothing later seen."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.next_token import NextToken
from shapes import tiny_shape

EOT = 36


@pytest.fixture
def twin(tiny_layout: Layout) -> Backbone:
    params = tiny_shape(qk_norm=True, clean_mask="block")
    model = Backbone(params.twin(), tiny_layout).double()
    initialise(model, 3)
    return model


def windows_of(layout: Layout, n: int) -> Tensor:
    draws = np.random.Generator(np.random.Philox(key=2))
    return torch.from_numpy(draws.integers(layout.vocab_size, size=(n, layout.window_tokens)))


def test_each_token_is_predicted_from_the_tokens_before_it(
    twin: Backbone, tiny_layout: Layout
) -> None:
    objective = NextToken(layout=tiny_layout, eot_id=EOT, vocab_chunk=10)
    windows = windows_of(tiny_layout, 1)
    got = objective.nats(twin, windows)
    row = windows[0].tolist()
    for position in (0, 1, 7, 15):
        prefix = torch.tensor([[EOT, *row[:position]]])
        with torch.no_grad():
            logits = twin.logits(twin.encode(prefix).hidden[0, -1])
        expected = F.cross_entropy(logits, windows[0, position])
        assert float(got[0, position]) == pytest.approx(float(expected), abs=1e-10)


def test_a_later_token_changes_no_earlier_loss(twin: Backbone, tiny_layout: Layout) -> None:
    objective = NextToken(layout=tiny_layout, eot_id=EOT, vocab_chunk=10)
    windows = windows_of(tiny_layout, 1)
    changed = windows.clone()
    changed[0, 9] = (changed[0, 9] + 1) % tiny_layout.vocab_size
    one, two = objective.nats(twin, windows), objective.nats(twin, changed)
    assert torch.equal(one[0, :9], two[0, :9])
    assert not torch.equal(one[0, 9:], two[0, 9:])


def test_the_loss_is_the_sum_over_all_tokens_of_the_windows(
    twin: Backbone, tiny_layout: Layout
) -> None:
    objective = NextToken(layout=tiny_layout, eot_id=EOT, vocab_chunk=10)
    windows = windows_of(tiny_layout, 3)
    total = objective.loss(twin, windows, np.arange(3))
    assert total.n_targets == 3 * tiny_layout.window_tokens
    expected = float(objective.nats(twin, windows).sum())
    assert float(total.nats.detach()) == pytest.approx(expected, rel=1e-12)
