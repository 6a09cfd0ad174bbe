import math

import torch
from torch import Tensor

from canvaslm.sampling.acceptance import EntropyBound, Quota, UnchangedOrStronger
from canvaslm.sampling.prediction import Prediction


def _now(
    *,
    step: int = 1,
    n_steps: int = 4,
    argmax: list[int] | None = None,
    confidence: list[float] | None = None,
    entropy: list[float] | None = None,
) -> Prediction:
    n = len(argmax or confidence or entropy or [])
    ids = torch.tensor([argmax or [0] * n])
    return Prediction(
        step=step,
        n_steps=n_steps,
        candidates=ids,
        argmax=ids,
        confidence=torch.tensor([confidence or [0.5] * n], dtype=torch.float64),
        entropy=torch.tensor([entropy or [1.0] * n], dtype=torch.float64),
    )


def _mask(*positions: int, n: int) -> Tensor:
    mask = torch.zeros(1, n, dtype=torch.bool)
    mask[0, list(positions)] = True
    return mask


def _positions(mask: Tensor) -> list[int]:
    assert mask.shape[0] == 1
    return mask[0].nonzero().flatten().tolist()


def test_unchanged_or_stronger_accepts_nothing_on_the_first_step() -> None:
    now = _now(step=0, argmax=[1, 2], confidence=[1.0, 1.0])
    assert _positions(UnchangedOrStronger().accept(now, None, _mask(n=2))) == []


def test_unchanged_or_stronger_accepts_either_sign_and_keeps_what_it_has() -> None:
    before = _now(argmax=[1, 1, 1, 1, 1], confidence=[0.5, 0.5, 0.5, 0.5, 0.5])
    now = _now(argmax=[1, 2, 2, 2, 2], confidence=[0.1, 0.6, 0.5, 0.4, 0.4])
    rule = UnchangedOrStronger()
    # unchanged; stronger; exactly as strong; neither; neither, but accepted before
    assert _positions(rule.accept(now, before, _mask(4, n=5))) == [0, 1, 2, 4]


def test_entropy_bound_accepts_the_longest_prefix_within_the_bound() -> None:
    now = _now(entropy=[0.09, 0.02, 3.0, 0.05, 0.04])
    # ascending 0.02 0.04 0.05 0.09 3.0; spent before each 0 0.02 0.06 0.11 0.20
    assert _positions(EntropyBound(bound=0.1).accept(now, None, _mask(n=5))) == [1, 3, 4]
    assert _positions(EntropyBound(bound=0.11).accept(now, None, _mask(n=5))) == [0, 1, 3, 4]


def test_entropy_bound_accepts_at_least_one() -> None:
    now = _now(entropy=[5.0, 4.0, 6.0])
    assert _positions(EntropyBound(bound=0.0).accept(now, None, _mask(n=3))) == [1]


def test_entropy_bound_takes_a_position_back() -> None:
    now = _now(entropy=[5.0, 0.01, 6.0])
    assert _positions(EntropyBound(bound=0.1).accept(now, None, _mask(0, 2, n=3))) == [0, 1]
    assert not EntropyBound.is_monotone


def test_quota_follows_its_timetable_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    for canvas_tokens, n_steps in ((7, 3), (16, 16), (5, 8), (256, 17)):
        accepted = _mask(n=canvas_tokens)
        for step in range(n_steps):
            confidence = torch.rand(canvas_tokens, generator=generator).tolist()
            now = _now(step=step, n_steps=n_steps, confidence=confidence)
            held = accepted
            accepted = Quota(threshold=1.0).accept(now, None, accepted)
            assert int(accepted.sum()) == math.ceil((step + 1) * canvas_tokens / n_steps)
            assert (accepted | ~held).all()
        assert accepted.all()


def test_quota_takes_the_most_confident_and_whatever_is_above_the_threshold() -> None:
    now = _now(step=0, n_steps=4, confidence=[0.2, 0.95, 0.3, 0.92])
    assert _positions(Quota(threshold=1.0).accept(now, None, _mask(n=4))) == [1]
    assert _positions(Quota(threshold=0.9).accept(now, None, _mask(n=4))) == [1, 3]


def test_rules_judge_rows_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (3, 6)

    def draw() -> Prediction:
        ids = torch.randint(3, shape, generator=generator)
        return Prediction(
            step=1,
            n_steps=4,
            candidates=ids,
            argmax=ids,
            confidence=torch.rand(shape, generator=generator, dtype=torch.float64),
            entropy=torch.rand(shape, generator=generator, dtype=torch.float64) * 0.1,
        )

    before, now = draw(), draw()
    held = torch.rand(shape, generator=generator) < 0.3
    for rule in (UnchangedOrStronger(), EntropyBound(bound=0.1), Quota(threshold=0.9)):
        together = rule.accept(now, before, held)
        for row in range(3):
            chosen = torch.tensor([row])
            alone = rule.accept(now.rows(chosen), before.rows(chosen), held[chosen])
            assert torch.equal(alone[0], together[row])


# BR-61
def test_no_rule_accepts_a_number_that_is_not_finite() -> None:
    nan = math.nan
    before = _now(argmax=[1, 1, 1], confidence=[0.5, 0.5, 0.5])
    now = _now(step=3, argmax=[0, 1, 0], confidence=[nan, 0.5, nan], entropy=[nan, 9.0, nan])
    for rule in (UnchangedOrStronger(), EntropyBound(bound=0.1), Quota(threshold=0.9)):
        assert _positions(rule.accept(now, before, _mask(n=3))) == [1]
    hopeless = _now(step=3, confidence=[nan, nan], entropy=[nan, nan])
    for rule in (EntropyBound(bound=0.1), Quota(threshold=0.9)):
        assert _positions(rule.accept(hopeless, None, _mask(n=2))) == []
