"""Does the roofline follow from the sizes of the model and the rates of the device?"""

import pytest

import roofline
from canvaslm.model.shape import count_parameters
from roofline import DEVICES

MODEL, LAYOUT = roofline._production()


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_one_token_lasts_as_long_as_its_weights_take(device: roofline.Device) -> None:
    twin = MODEL.twin()
    seconds = roofline._seconds(
        device, twin, LAYOUT, rows=1, tokens=1, scored=1, embeds_guess=False
    )
    weights_s = 2 * count_parameters(twin, LAYOUT) / device.bytes_per_s
    assert weights_s < seconds < 1.1 * weights_s


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_the_gain_shrinks_with_steps_and_with_the_batch_and_ends_where_it_says(
    device: roofline.Device,
) -> None:
    def gain(n_steps: int, rows: int) -> float:
        return roofline._gain(device, MODEL, LAYOUT, n_steps, rows)

    by_steps = [gain(n_steps, 8) for n_steps in (4, 8, 16, 32)]
    by_rows = [gain(16, rows) for rows in (1, 2, 8, 32, 128)]
    assert by_steps == sorted(by_steps, reverse=True)
    assert by_rows == sorted(by_rows, reverse=True)
    last = int(roofline._last_batch(device, MODEL, LAYOUT, 32))
    assert gain(32, last) > 1 >= gain(32, last + 1)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_guess_is_counted_where_the_network_takes_one(device: roofline.Device) -> None:
    gains = [
        roofline._gain(device, MODEL.model_copy(update={"self_conditioning": kind}), LAYOUT, 16, 1)
        for kind in ("off", "output")
    ]
    assert gains[0] > 1.1 * gains[1]  # the table is read once more in each step


def test_a_gain_that_never_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_MOST_ROWS", 3)
    assert roofline._last_batch(DEVICES[0], MODEL, LAYOUT, 4) == "does not end"
