import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from canvaslm.diffusion.schedule import (
    DiffusionParams,
    clean_share,
    noisy_share,
    position_times,
    tilt_speed,
)
from canvaslm.errors import InputError
from canvaslm.run_audit.tilted import position_shares
from oracles import kept_share, tilted_time
from shapes import tiny_diffusion

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("n_times", [1, 2, 3, 16, 61])
def test_clean_share_is_the_literal_one_at_the_start_and_zero_at_the_end(n_times: int) -> None:
    assert clean_share(0, n_times) == 1.0
    assert clean_share(n_times, n_times) == 0.0
    assert clean_share(torch.tensor([0, n_times]), n_times).tolist() == [1.0, 0.0]
    assert clean_share(np.array([0, n_times]), n_times).tolist() == [1.0, 0.0]


def test_clean_share_is_the_squared_cosine_in_every_kind_of_number() -> None:
    times = np.linspace(0, 16, 33)
    expected = np.array([kept_share(t, 16) for t in times])
    np.testing.assert_allclose(clean_share(times, 16), expected, rtol=1e-14)
    np.testing.assert_allclose([clean_share(float(t), 16) for t in times], expected, rtol=1e-14)
    tensor = clean_share(torch.from_numpy(times).float(), 16)
    assert tensor.dtype == torch.float64
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-14)


def test_clean_share_falls_strictly() -> None:
    assert np.all(np.diff(clean_share(np.arange(65), 64)) < 0)


def test_clean_share_keeps_the_kind_and_shape_of_the_times() -> None:
    assert isinstance(clean_share(3, 16), float)
    assert isinstance(clean_share(np.float64(3), 16), float)
    assert clean_share(np.ones((2, 3), dtype=np.int64), 16).shape == (2, 3)
    assert clean_share(torch.ones(2, 3, dtype=torch.int64), 16).shape == (2, 3)


@pytest.mark.parametrize(
    "t", [-1, 17, float("nan"), -1e-9, np.array([3, 17]), torch.tensor([[0, -1]])]
)
def test_times_outside_the_process_are_refused(t: float) -> None:
    with pytest.raises(InputError, match=r"times in 0\.\.16"):
        clean_share(t, 16)


def test_schedule_loads_without_torch() -> None:
    program = (
        "import sys; from canvaslm.diffusion.schedule import DiffusionParams, clean_share; "
        "clean_share(3, 16); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SRC)}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    "change",
    [
        {"train_times": 0},
        {"context": "dirty"},
        {"self_conditioning_share": 1.5},
        {"time_draw": "late"},
        {"next_token_weight": -1.0},
        {"next_token_weight": 1.0, "context": "noisy"},
        {"first_phase": "noisy"},
        {"first_phase_share": 0.5},
        {"first_phase": "noisy", "first_phase_share": 0.5, "context": "prefix"},
        {"loss": "bound", "train_times": None},
    ],
)
def test_params_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    whole = tiny_diffusion().model_dump()
    DiffusionParams.model_validate(whole)
    with pytest.raises(ValidationError):
        DiffusionParams.model_validate(whole | change)


@pytest.mark.parametrize("n_times", [1, 4, 16])
@pytest.mark.parametrize("tilt", [0.0, 0.3, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("canvas_tokens", [1, 2, 5, 16])
def test_each_position_of_a_tilted_canvas_has_its_own_part_of_the_time(
    canvas_tokens: int, tilt: float, n_times: int
) -> None:
    """Three ways to write it: as it is used, as the audit has it, and as the tests have it."""
    times = np.linspace(0, n_times, 2 * n_times + 1)
    found = position_times(times, canvas_tokens=canvas_tokens, n_times=n_times, tilt=tilt)
    tensor = position_times(
        torch.from_numpy(times), canvas_tokens=canvas_tokens, n_times=n_times, tilt=tilt
    )
    assert np.array_equal(tensor.numpy(), found)
    found = found.reshape(-1, canvas_tokens)
    assert np.all(found[0] == 0)
    assert np.all(found[-1] == n_times)
    assert np.all(np.diff(found, axis=1) >= 0)  # noise comes from the right
    for t, row in zip(times.tolist(), found, strict=True):
        by_hand = [
            tilted_time(t, i, canvas_tokens=canvas_tokens, n_times=n_times, tilt=tilt)
            for i in range(canvas_tokens)
        ]
        audited = position_shares(t / n_times, canvas_tokens, tilt)
        np.testing.assert_allclose(row, by_hand, rtol=0, atol=1e-9)
        np.testing.assert_allclose(row, np.array(audited) * n_times, rtol=0, atol=1e-9)
        for one, other, third in zip(row.tolist(), by_hand, audited, strict=True):
            ends = (one in (0, n_times), other in (0, n_times), third in (0, 1))
            assert len(set(ends)) == 1  # at an end all three stand exactly


def test_without_a_tilt_times_stay_what_they_are() -> None:
    times = torch.tensor([[1, 3]])
    found = position_times(times, canvas_tokens=2, n_times=4, tilt=0.0)
    assert found.dtype == torch.int64
    assert found.tolist() == [[1, 1, 3, 3]]


@pytest.mark.parametrize("canvas_tokens", [1, 2, 9])
@pytest.mark.parametrize("tilt", [0.0, 1.0, 3.0])
def test_speed_and_share_are_those_of_the_times(canvas_tokens: int, tilt: float) -> None:
    times = (np.arange(200_000) + 0.5) / 200_000
    each = position_times(times, canvas_tokens=canvas_tokens, n_times=1, tilt=tilt)
    moves = (each > 0) & (each < 1)
    assert moves.mean() * tilt_speed(tilt, canvas_tokens) == pytest.approx(1, abs=1e-4)
    assert (each > 0).mean() == pytest.approx(noisy_share(tilt, canvas_tokens), abs=1e-4)
