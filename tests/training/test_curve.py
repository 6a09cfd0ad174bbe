"""Is the curve a function of the record of steps, and are skipped steps neither hidden nor NaN?"""

import csv
import json

import pytest

from canvaslm.errors import InputError
from canvaslm.training.curve import refuse_unwritable, write_curve, write_metrics
from canvaslm.training.run_state import StepRecord


def ran(step, nats, targets):
    return StepRecord(
        step=step, nats=nats, targets=targets, gradient_norm=1.5, learning_rate=0.25, cause=""
    )


def skipped(step, cause="loss is nan"):
    return StepRecord(
        step=step, nats=None, targets=7, gradient_norm=None, learning_rate=0.25, cause=cause
    )


def write(out, records, log_every, seconds=None):
    return write_curve(
        out,
        records,
        seconds or [0.5] * len(records),
        log_every=log_every,
        windows_per_step=4,
        window_tokens=16,
        flops_of_first=lambda windows: 10.0 * windows,
    )


def read(path):
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_a_row_is_summed_nats_over_summed_targets_since_the_row_before(tmp_path):
    write(tmp_path, [ran(0, 10.0, 5), ran(1, 8.0, 1), ran(2, 4.0, 2)], log_every=2)
    first, last = read(tmp_path / "loss.csv")
    assert float(first["loss_nats"]) == 3.0  # not 5.0, the mean of the two means (BR-35)
    assert [float(first[key]) for key in ("step", "windows", "tokens", "flops")] == [2, 8, 128, 80]
    assert (first["targets"], first["gradient_norm"], first["learning_rate"]) == (
        "6",
        "1.5",
        "0.25",
    )
    assert (last["step"], float(last["loss_nats"])) == ("3", 2.0)  # the last step has a row always


def test_skipped_steps_are_counted_beside_the_mean_and_not_in_it(tmp_path):
    """BR-51: the mean says over how many targets it is, and how many steps it lacks."""
    write(tmp_path, [ran(0, 10.0, 5), skipped(1)], log_every=2)
    [row] = read(tmp_path / "loss.csv")
    assert (float(row["loss_nats"]), row["targets"], row["skipped_steps"]) == (2.0, "5", "1")


def test_a_span_in_which_nothing_ran_has_no_loss(tmp_path):
    records = [skipped(0), skipped(1, "no targets")]
    last = write(tmp_path, records, log_every=2)
    [row] = read(tmp_path / "loss.csv")
    assert (row["loss_nats"], row["gradient_norm"], row["skipped_steps"]) == ("", "", "2")
    write_metrics(
        tmp_path,
        records,
        last,
        n_windows=10,
        n_parameters=3,
        vocab_size=37,
        rollbacks=(),
        parent=None,
        model_sha256="ab",
        closed=None,
    )
    metrics = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert metrics["final_loss_nats_per_target"] is None
    assert "not finite" in metrics["final_loss_nats_per_target_reason"]
    assert (metrics["bad_steps"], metrics["steps_without_targets"]) == (1, 1)
    assert metrics["verdict"] == "fail"
    assert metrics["verdict_reason"] == (
        "its final loss is not known: all of the last 2 steps changed nothing; "
        "came to its end with 1 bad step and 0 rollbacks"
    )


@pytest.mark.parametrize(("mean", "verdict"), [(3.79, "pass"), (3.80, "fail"), (2e16, "fail")])
def test_a_run_that_ends_worse_than_a_guess_did_not_succeed(tmp_path, mean, verdict):
    """ln 37 = 3.611; up to 5 % above it may be noise."""
    records = [ran(0, 2.0, 1), ran(1, mean * 4, 4)]
    write_metrics(
        tmp_path,
        records,
        write(tmp_path, records, 1),
        n_windows=8,
        n_parameters=3,
        vocab_size=37,
        rollbacks=(),
        parent=None,
        model_sha256=None,
        closed=None,
    )
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["verdict"] == verdict
    told = "is more than 5% above ln V = 3.611, that of a uniform guess: it diverged"
    assert (told in metrics["verdict_reason"]) == (verdict == "fail")


def test_metrics_tell_where_the_run_ended_and_no_clock(tmp_path):
    records = [ran(step, 6.0, 2) for step in range(5)]
    write_metrics(
        tmp_path,
        records,
        write(tmp_path, records, 2),
        n_windows=8,
        n_parameters=3,
        vocab_size=37,
        rollbacks=(),
        parent=None,
        model_sha256="ab",
        closed=None,
    )
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "bad_steps": 0,
        "bad_steps_before_rollbacks": 0,
        "epochs": 2.5,
        "final_loss_nats_per_target": 3.0,
        "flops": 200.0,
        "model_sha256": "ab",
        "parameters": 3,
        "parent": None,
        "rollbacks": 0,
        "steps": 5,
        "steps_marked": 0,
        "steps_without_targets": 0,
        "tokens": 320,
        "verdict": "pass",
        "verdict_reason": "",
        "windows": 20,
    }


def test_timing_has_the_seconds_and_the_rate_of_each_row(tmp_path):
    write(tmp_path, [ran(step, 6.0, 2) for step in range(5)], log_every=2)
    rows = [tuple(map(float, row.values())) for row in read(tmp_path / "timing.csv")]
    assert rows == [(2, 1.0, 128.0), (4, 1.0, 128.0), (5, 0.5, 128.0)]


@pytest.mark.parametrize(
    ("seconds", "row"),
    [([0.5, None], ["2", "", ""]), ([0.0, 0.0], ["2", "0.000000", ""])],
)
def test_seconds_that_are_not_known_or_none_give_no_rate(tmp_path, seconds, row):
    write(tmp_path, [ran(0, 1.0, 5), ran(1, 1.0, 5)], log_every=2, seconds=seconds)
    assert [list(each.values()) for each in read(tmp_path / "timing.csv")] == [row]


def test_a_report_that_could_not_be_written_is_refused_by_place(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "reports" / "metrics.json").mkdir(parents=True)
    for place in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(InputError, match="file: expected a folder, got a file"):
            refuse_unwritable(place)
    with pytest.raises(InputError, match=r"metrics\.json: expected a file, got a folder"):
        refuse_unwritable(tmp_path / "reports")
    refuse_unwritable(tmp_path / "absent" / "deep")


def test_a_folder_of_the_user_is_not_taken_for_a_trace(tmp_path):
    (tmp_path / "nonfinite").mkdir()
    (tmp_path / "nonfinite" / "trace.json").write_text("{}")
    refuse_unwritable(tmp_path)
    (tmp_path / "nonfinite" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"nonfinite: .* got 'thesis\.tex'"):
        refuse_unwritable(tmp_path)
