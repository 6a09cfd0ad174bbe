"""Does an audit walk on after a failure, name the first, and write before it closes the gate?"""

import dataclasses
import json
import re

import pytest

from canvaslm.errors import GateClosedError
from canvaslm.reporting.verdict import Verdict
from canvaslm.run_audit import page, walk
from canvaslm.run_audit.check import Check, Group, attempt, decide
from canvaslm.run_audit.page import render_audit
from canvaslm.run_audit.walk import RunAudit, audit_run


def check(name: str, verdict: Verdict = "pass", group: Group = "data") -> Check:
    return Check(
        group=group,
        name=name,
        measured=f"{name} <was> measured",
        expected=f"{name} expected",
        verdict=verdict,
        first_test=f"look at {name}",
    )


def groups(monkeypatch, **makes):
    order = ("data", "flow", "values", "updates", "state")
    given = tuple((name, makes.get(name, lambda subject: [])) for name in order)
    monkeypatch.setattr(walk, "_GROUPS", given)


def broken(subject):
    raise ZeroDivisionError("float\ndivision")


def test_groups_are_walked_in_the_order_of_cause_and_effect():
    assert [name for name, _ in walk._GROUPS] == ["data", "flow", "values", "updates", "state"]


def test_a_group_that_breaks_is_one_failed_check_and_the_walk_goes_on(open_run, monkeypatch):
    groups(monkeypatch, flow=broken, state=lambda subject: [check("last", group="state")])
    audit = walk.walk(open_run("diffusion"))
    assert [(c.name, c.verdict) for c in audit.checks] == [
        ("flow_can_be_checked", "fail"),
        ("last", "pass"),
    ]
    assert audit.failures[0].measured == "ZeroDivisionError: float division"


def test_a_check_that_breaks_has_failed_under_its_own_name():
    found = attempt("values", "something", lambda: broken(None))
    assert (found.group, found.name, found.verdict) == ("values", "something", "fail")
    assert found.measured == "ZeroDivisionError: float division"


def test_ctrl_c_is_no_failed_check():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt("values", "something", interrupted)


def test_a_claim_that_holds_passes_and_another_fails():
    words = {"measured": "m", "expected": "e", "first_test": "t"}
    assert decide("data", "a", holds=True, **words).verdict == "pass"
    assert decide("data", "a", holds=False, **words).verdict == "fail"


def test_what_is_not_measured_closes_no_gate_and_is_counted(open_run, monkeypatch, tmp_path):
    groups(monkeypatch, data=lambda subject: [check("a"), check("b", "not_measured")])
    audit_run(open_run("diffusion"), out=tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["verdict"] == "pass"
    assert metrics["verdict_reason"] == "1 checks pass; not measured: b"
    assert (metrics["n_checks"], metrics["n_failed"], metrics["n_not_measured"]) == (2, 0, 1)
    assert "not measured: b" in (tmp_path / "index.html").read_text()


def test_the_first_failure_closes_the_gate_when_both_files_are_written(
    open_run, monkeypatch, tmp_path
):
    groups(
        monkeypatch,
        data=lambda subject: [check("a"), check("b", "fail")],
        flow=lambda subject: [check("c", "fail", "flow")],
    )
    with pytest.raises(GateClosedError, match=r"^audit_run: b: .*\(1 more after it\).*look at b"):
        audit_run(open_run("diffusion"), out=tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["first_failure"], metrics["n_failed"]) == ("b", 2)
    assert [c["name"] for c in metrics["checks"]] == ["a", "b", "c"]
    text = (tmp_path / "index.html").read_text()
    assert text.index("failed: b") < text.index("look at b") < text.index("<code>a</code>")
    assert text.count("first failure") == 1
    assert text.count("fails after the first") == 1
    assert "1 more failed after it" in text


def test_a_name_stands_for_one_check(open_run, monkeypatch):
    groups(monkeypatch, data=lambda s: [check("a")], flow=lambda s: [check("a", group="flow")])
    with pytest.raises(AssertionError, match="a name stands for one check"):
        walk.walk(open_run("diffusion"))


def test_verdict_and_reason_of_a_clean_audit():
    alone = RunAudit(objective="diffusion", checks=[check("a"), check("b", "fail")])
    assert alone.verdict_reason == "b: b <was> measured"
    audit = RunAudit(objective="diffusion", checks=[check("a"), check("b")])
    assert (audit.verdict, audit.verdict_reason) == ("pass", "2 checks pass")
    assert audit.metrics()["first_failure"] is None


def test_a_page_needs_nothing_but_itself_and_escapes_what_it_is_given(open_run):
    text = render_audit(open_run("diffusion"), [check("a")])
    assert "a &lt;was&gt; measured" in text
    assert text.count("<svg") == 3
    outside = re.findall(r"https?://(?!www\.w3\.org)|<script|<link|url\((?!#)", text)
    assert outside == []
    assert "prefers-color-scheme: dark" in text


def test_rows_that_cannot_be_decoded_are_not_measured_with_the_reason(open_run):
    text = render_audit(open_run("diffusion"), [check("a")])  # its tokenizer is no file
    assert "not measured: InputError" in text
    assert "no_tokenizer.json" in text


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_rows_show_what_was_read_and_asked_for(open_run, monkeypatch, kind):
    class Letters:
        @classmethod
        def load(cls, path):
            return cls()

        def decode(self, ids):
            return "".join(chr(ord("A") + int(i)) for i in ids)

    monkeypatch.setattr(page, "Tokenizer", Letters)
    subject = open_run(kind)
    rows = page._decode_rows(subject)
    assert [row.place.split(",")[0] for row in rows] == ["window 0", "window 15", "window 31"]
    for row, sample in zip(rows, page.read_back(subject), strict=False):
        window = Letters().decode(sample.window)
        if kind == "autoregressive":
            assert (row.read, row.asked) == (f"A{window[:-1]}", window)  # A: the end of text
        else:
            assert len(row.read) == len(row.asked) == 4
            assert row.asked in window
            assert "at time" in row.place


def test_a_damaged_log_still_gives_a_page(open_run):
    subject = open_run("diffusion")
    rows = [{"step": "x"}, *subject.loss_rows, {"step": "14", "loss_nats": "inf"}]
    text = render_audit(dataclasses.replace(subject, loss_rows=rows), [check("a")])
    assert text.count("<svg") == 3
    text = render_audit(dataclasses.replace(subject, loss_rows=[]), [check("a")])
    assert text.count("not measured: no loss in the log") == 1
