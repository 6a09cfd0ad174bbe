import numpy as np
import pytest

from canvaslm.ablation.extrapolation import fit_laws

LENGTHS = (400, 800, 1600, 3200, 6400)


@pytest.mark.parametrize("floor", [0.0, 2.5])
def test_a_power_law_is_found_and_goes_on(floor: float) -> None:
    figures = [floor + 9.0 * n**-0.3 for n in LENGTHS]
    laws = fit_laws(LENGTHS, figures)
    assert laws is not None
    assert laws["power"].floor == pytest.approx(floor, abs=0.02)
    assert laws["power"].slope == pytest.approx(0.3, rel=0.02)
    assert laws["power"].at(640_000) == pytest.approx(floor + 9.0 * 640_000**-0.3, abs=0.01)
    assert laws["power"].largest_miss < 1e-3
    assert laws["line"].largest_miss > 10 * laws["power"].largest_miss


def test_a_line_over_the_logarithm_is_found_and_goes_on() -> None:
    laws = fit_laws(LENGTHS, [8.0 - 0.4 * np.log(n) for n in LENGTHS])
    assert laws is not None
    assert laws["line"].slope == pytest.approx(-0.4)
    assert laws["line"].at(64_000) == pytest.approx(8.0 - 0.4 * np.log(64_000))
    assert laws["line"].at(64_000) <= laws["power"].at(64_000), "the line is the hopeful one"


def test_no_floor_lies_below_nothing() -> None:
    laws = fit_laws(LENGTHS, [1.0, 0.7, 0.4, 0.2, 0.0])
    assert laws is not None
    assert laws["power"].floor >= 0


def test_three_lengths_predict_nothing() -> None:
    assert fit_laws((400, 800, 800, 1600), (3.0, 2.0, 2.1, 1.5)) is None
