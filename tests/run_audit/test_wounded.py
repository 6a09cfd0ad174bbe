"""Does a run that skipped steps, or went back, pass its audit with all of that on show?"""

import dataclasses

import pytest

from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import untracked
from canvaslm.run_audit.params import AuditRunParams
from canvaslm.run_audit.subject import open_subject
from canvaslm.run_audit.walk import walk
from canvaslm.training.job import make_job
from canvaslm.training.run import pretrain
from runs import Poisoned

PARAMS = AuditRunParams(
    seed=5,
    device="cpu",
    n_windows=4,
    max_held_out_windows=8,
    overfit_steps=120,
    overfit_nats=0.1,
    overfit_learning_rate=0.03,
)


@pytest.fixture
def audit_poisoned(open_run, tmp_path):
    """Audit a run to which some windows, by their numbers, were poison."""

    def audit(kind, poison, **knobs):
        subject = open_run(kind)
        recipe = dataclasses.replace(
            subject.recipe, pretrain=subject.recipe.pretrain.model_copy(update=knobs)
        )
        job = make_job(recipe, shards=subject.shards, code_digest="c")
        poisoned = dataclasses.replace(job, objective=Poisoned(job.objective, poison))
        out, reports = tmp_path / "out", tmp_path / "reports"
        pretrain(poisoned, work=tmp_path / "work", out=out, reports=reports, track=untracked)
        write_json(tmp_path / "corpus.json", {"entropy_rate_nats_per_byte": "not_measured"})
        return walk(
            open_subject(
                recipe,
                params=PARAMS,
                checkpoint=out,
                shards=subject.shards,
                tokenizer=subject.tokenizer,
                reports=reports,
                corpus_metrics=tmp_path / "corpus.json",
                code_digest="c",
                track=untracked,
            )
        )

    return audit


def told(audit, name):
    (check,) = (check for check in audit.checks if check.name == name)
    return check.measured


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_run_that_skipped_two_steps_in_a_row_of_the_log_passes(audit_poisoned, failures, kind):
    audit = audit_poisoned(kind, [9, 13])  # steps 2 and 3 of a log with a row for every two
    assert failures(audit.checks) == [], audit.verdict_reason
    skipped = told(audit, "skipped_steps_are_counted")
    assert skipped.startswith(
        "2 skipped by the state and 2 by the log, with 8 windows; 0 rollbacks"
    )
    assert told(audit, "no_held_out_window_consumed").startswith("0 of 40 windows")
    assert told(audit, "moments_counted_every_update").startswith("counters at 10;")


def test_a_run_that_went_back_passes_and_shows_what_it_marked(audit_poisoned, failures):
    audit = audit_poisoned(
        "diffusion", [20, 24, 28], max_consecutive_bad_steps=3, save_every=2
    )  # steps 5, 6 and 7
    assert failures(audit.checks) == [], audit.verdict_reason
    found = told(audit, "skipped_steps_are_counted")
    assert found.startswith("3 skipped by the state and 3 by the log, with 12 windows")
    assert found.endswith("1 rollbacks marked 1")  # the step that began it
    assert told(audit, "moments_counted_every_update").startswith("counters at 9;")
