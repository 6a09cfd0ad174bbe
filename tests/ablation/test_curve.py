from xml.etree import ElementTree

import pytest

from canvaslm.ablation.comparison import Result
from canvaslm.ablation.curve import draw_curve, figures_of, fits_of, numbers_of
from canvaslm.ablation.spec import Spec, Value

ARMS = {"sixteen": 16, "one": 1, "four": 4}


def spec_of(arms: dict[str, Value], varies: str = "layout.canvas_tokens") -> Spec:
    return Spec.model_validate(
        {
            "id": "dial", "question": "?", "hypothesis": "!", "profile": "ci", "overrides": {},
            "varies": varies, "baseline": next(iter(arms)), "seeds": [1, 2],
            "arms": {name: {varies: value} for name, value in arms.items()},
            "also": [
                {"file": "reports/eval_loss_parity/metrics.json", "key": "gap_percent",
                 "better": "lower"},
                {"file": "reports/eval_speedup/metrics.json", "key": "rows.fixed_16.forwards",
                 "better": "higher"},
                {"file": "reports/eval_speedup/metrics.json", "key": "rows.fixed_16.tokens",
                 "better": "higher"},
            ],
            "does_not_establish": ["more"],
            "decision": {"paired_interval_excludes": 0.1, "confidence": 0.95},
            "timing": {"steps": 1, "rounds": 1, "warmup_rounds": 0},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arms", "found"),
    [
        (ARMS, [1.0, 4.0, 16.0]),
        ({"a": 0.5, "b": 2, "c": 0.1}, [0.1, 0.5, 2.0]),
        ({"a": 1, "b": 2}, None),
        ({"a": 1, "b": 2, "c": 2}, None),
        ({"a": 1, "b": 2, "c": True}, None),
        ({"a": 1, "b": 2, "c": None}, None),
        ({"a": "clean", "b": "noisy", "c": "prefix"}, None),
    ],
)
def test_three_numbers_make_a_curve_and_nothing_else_does(
    arms: dict[str, Value], found: list[float] | None
) -> None:
    numbers = numbers_of(spec_of(arms), arms)
    assert (numbers and list(numbers.values())) == found


def test_every_figure_has_a_panel_with_a_point_for_each_arm() -> None:
    spec = spec_of({**ARMS})
    results = {
        name: Result(
            name=name, by_seed=(5.0 + value, 6.0 + value), also=(3.0, 2.0 * value, 1.0),
            costs={}, as_run=None, against={}, judgement=None,
        )
        for name, value in ARMS.items()
    }  # fmt: skip
    numbers = numbers_of(spec, {**ARMS})
    assert numbers is not None
    assert list(numbers) == ["one", "four", "sixteen"]
    figures = figures_of(spec, numbers, results)
    assert figures["eval_speedup.rows.fixed_16.forwards"] == [2.0, 8.0, 32.0]
    assert fits_of(spec, numbers, figures) == {}, "canvases do not get longer by training"
    picture = draw_curve(spec, numbers, results, {})
    assert picture == draw_curve(spec, numbers, results, {})
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter()]
    for measure in (spec.measure, *spec.also):
        assert any(measure.key in text for text in texts), measure.key
    assert sum("layout.canvas_tokens" in text for text in texts) >= 4
    markers = ElementTree.tostring(ElementTree.fromstring(picture), "unicode").count(":use ")
    assert markers >= 4 * len(ARMS) + 2 * len(ARMS)  # the judged figure shows its seeds too


def test_along_the_length_of_training_the_laws_go_on_beyond_it() -> None:
    arms: dict[str, Value] = {"a": 100, "b": 200, "c": 400, "d": 800}
    spec = spec_of(arms, "pretrain.steps")
    results = {
        name: Result(
            name=name, by_seed=(3.0 + 20.0 / value**0.5,), also=(3.0, 2.0, 1.0),
            costs={}, as_run=None, against={}, judgement=None,
        )
        for name, value in arms.items()
        if isinstance(value, int)
    }  # fmt: skip
    numbers = numbers_of(spec, arms)
    assert numbers is not None
    fits = fits_of(spec, numbers, figures_of(spec, numbers, results))
    laws = fits["eval_loss_parity.diffusion.bound_nats_per_token"]
    assert laws["power"].at(80_000) == pytest.approx(3.0 + 20.0 / 80_000**0.5, abs=0.01)
    picture = draw_curve(spec, numbers, results, fits)
    for text in ("power law", "line over the logarithm", "×10", "×100"):
        assert text in picture
