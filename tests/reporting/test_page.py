import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from canvaslm import reporting
from canvaslm.reporting.charts import draw_figures
from canvaslm.reporting.files import write_csv, write_json
from canvaslm.reporting.page import ReportParams, read_content, render_page
from canvaslm.reporting.provenance import Record

LOSS = ("step", "tokens", "flops", "loss_nats")
ROW = {"tokens_per_forward": 1.0, "tokens_per_second": 40.0, "speedup_over_autoregressive": 1.0}


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Reports of every stage, with figures that are easy to find on the page."""
    write_json(
        tmp_path / "audit_windows" / "metrics.json",
        {"verdict": "pass", "train": {"windows": 4321}, "val": {"windows": 87}},
    )
    write_json(
        tmp_path / "audit_windows" / "samples.json", {"val": [{"text": "a <b> & c", "window": 0}]}
    )
    write_json(
        tmp_path / "eval_loss_parity" / "metrics.json",
        {
            "autoregressive": {"nats_per_token": 3.25, "standard_error_nats": None},
            "diffusion": {"bound_nats_per_token": 4.5, "standard_error_nats": 0.125},
            "gap_percent": 38.46,
            "verdict": "fail",
            "verdict_reason": "too far apart",
        },
    )
    write_csv(
        tmp_path / "eval_loss_parity" / "by_time.csv",
        ("t", "bound_nats_per_token"),
        [(1, 2.5), (2, 2.0)],
    )
    row = {"bound_nats_per_token": 4.375, "standard_error_nats": None, "gap_nats": 1.125}
    shares = {"gap_nats": 1.25, "discretisation_nats": -0.0625, "context_nats": 0.75}
    write_json(
        tmp_path / "eval_bound" / "metrics.json",
        {
            "autoregressive": {"nats_per_token": 3.25},
            "diffusion": {"off": {"continuous": row}, "two_pass": "not_measured"},
            "shares": {"n_times_16": shares},
            "proof": {"verdict": "pass"},
            "verdict": "pass",
        },
    )
    write_csv(
        tmp_path / "eval_bound" / "by_time.csv",
        ("sweep", "self_conditioning", "bound_nats_per_token"),
        [("continuous", "off", 2.25), ("continuous", "off", 2.125), ("n_times_16", "off", 9.0)],
    )
    for place in ("position", "canvas"):
        write_csv(
            tmp_path / "eval_bound" / f"by_{place}.csv",
            ("sweep", "self_conditioning", place, "bound_nats_per_token",
             "autoregressive_nats_per_token"),
            [("continuous", "off", 0, 4.5, 3.0), ("continuous", "off", 1, 4.25, 3.5),
             ("continuous", "two_pass", 0, 9.0, 3.0)],
        )  # fmt: skip
    for objective, first in (("diffusion", "head_is_tied"), ("autoregressive", None)):
        write_json(
            tmp_path / "audit_run" / objective / "metrics.json",
            {"verdict": "pass", "n_checks": 43, "n_failed": 0, "n_not_measured": 1}
            | {"first_failure": first},
        )
    sampler = {"acceptance": "quota", "stopping": "never", "twin_nats_per_token": 3.875,
               "forwards_per_token": 0.5625, "seconds_per_token": 0.0125, "standing": "frontier",
               "standing_reason": "on the frontier", "is_on_frontier_of_seconds": True}  # fmt: skip
    loop = sampler | {"stopping": "mean_entropy", "standing": "trade", "seconds_per_token": None,
                      "standing_reason": "trade: wins x by losing distinct_1",
                      "is_on_frontier_of_seconds": "not_measured"}  # fmt: skip
    unread = loop | {"twin_nats_per_token": "not_measured", "standing": "not_measured"}
    write_json(
        tmp_path / "eval_samples" / "metrics.json",
        {
            "rows": {"quota/mean_entropy/8": loop, "quota/never/8": sampler, "unread": unread},
            "autoregressive": {"twin_nats_per_token": 2.875, "forwards_per_token": 1.0},
            "held_out": {"twin_nats_per_token": 3.625},
            "verdict": "pass",
        },
    )
    slow = ROW | {"tokens_per_second": None, "speedup_over_autoregressive": "not_measured"}
    write_json(
        tmp_path / "eval_speedup" / "metrics.json",
        {
            "rows": {
                "autoregressive": ROW,
                "fixed_16": ROW | {"speedup_over_autoregressive": 2.31},
                "fixed_32": slow,
            },
            "held_out": {"unigram_entropy_nats": 3.125},
            "verdict": "pass",
        },
    )
    write_json(
        tmp_path / "eval_speedup" / "samples.json",
        {
            "samples": [
                {"decoder": "fixed_16", "new_tokens": n, "prompt": "Once", "text": f" upon {n} {i}"}
                for n in (64, 24)
                for i in range(3)
            ]
        },
    )
    write_json(
        tmp_path / "docs_gate" / "metrics.json",
        {"n_checked": {"links": 77}, "n_faults": 0, "verdict": "pass"},
    )
    for objective in ("diffusion", "autoregressive"):
        folder = tmp_path / "pretrain" / objective
        write_json(
            folder / "metrics.json", {"parameters": 343516160, "tokens": 1000, "verdict": "pass"}
        )
        write_csv(folder / "loss.csv", LOSS, [(1, 10, 1e9, 6.0), (2, 20, 2e9, ""), (3, 30, 3e9, 5)])
    write_json(tmp_path / "code" / "pretrain.json", {"digest": "d" * 64, "files": {}, "stage": "x"})
    return tmp_path


def page_of(reports: Path, n_samples: int = 2) -> str:
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=n_samples))
    return render_page(
        content,
        draw_figures(content.curves, content.bars, content.times, content.bound, content.marks),
    )


class Balance(HTMLParser):
    """Counts what is open, and collects ids and what is asked of elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.asked: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in {"src", "href", "xlink:href", "data", "action"}:
                self.asked.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_same_reports_give_the_same_bytes(reports: Path) -> None:
    assert page_of(reports) == page_of(reports)


def test_the_page_asks_for_nothing_but_itself(reports: Path) -> None:
    page = page_of(reports)
    own = ("#", "./audit_run/", "./pretrain/")  # a link that one may follow, beside the page
    assert all(target.startswith(own) for target in Balance(page).asked)
    assert not re.search(r"https?://|@import|url\((?!#)|<script|<link|<iframe", page)


def test_the_page_is_well_formed_and_its_ids_are_unique(reports: Path) -> None:
    balance = Balance(page_of(reports))
    assert balance.open == []
    assert len(balance.ids) == len(set(balance.ids))
    inside = {target[1:] for target in balance.asked if target.startswith("#")}
    assert inside <= set(balance.ids)


def test_the_page_shows_what_the_reports_hold(reports: Path) -> None:
    held = ["343,516,160", "4,321", ">87<", "4.5000", "0.1250", "3.2500", "38.5", "2.31", "3.125"]
    held += [">77<", "d" * 16, "too far apart", "4.500 ± 0.125", "3.250<", "<code>ci</code>"]
    held += [">4.3750<", ">1.1250<", ">continuous, off<", ">-0.0625 ± not measured<"]
    held += [">3.875<", ">0.562<", ">12.50<", ">trade: wins x by losing distinct 1<", ">2.875<"]
    held += [">43<", ">head is tied<", ">none<"]
    page = page_of(reports)
    assert [figure for figure in held if figure not in page] == []


def test_text_of_the_corpus_is_text_on_the_page(reports: Path) -> None:
    assert "a &lt;b&gt; &amp; c" in page_of(reports)


def test_control_characters_are_shown_as_what_cannot_be_shown(reports: Path) -> None:
    text = {"val": [{"text": "a\x00b\x1fc\n\td", "window": 0}]}
    write_json(reports / "audit_windows" / "samples.json", text)
    assert "a\ufffdb\ufffdc\n\td" in page_of(reports)


def test_samples_are_those_of_the_long_comparison_and_as_many_as_asked(reports: Path) -> None:
    page = page_of(reports)
    assert " upon 64 0" in page
    assert " upon 64 1" in page
    assert " upon 64 2" not in page
    assert "upon 24" not in page
    assert "upon" not in page_of(reports, n_samples=0)


def test_the_headline_is_the_worst_verdict(reports: Path) -> None:
    def headline() -> str:
        return read_content(reports, profile="ci", params=ReportParams(n_samples=0)).headline

    assert headline() == "fail"
    parity = reports / "eval_loss_parity" / "metrics.json"
    parity.write_text(json.dumps(json.loads(parity.read_text()) | {"verdict": "pass"}))
    assert headline() == "pass"
    (reports / "docs_gate" / "metrics.json").unlink()
    assert headline() == "not_measured"


def test_what_is_missing_is_not_measured_and_nothing_is_invented(tmp_path: Path) -> None:
    content = read_content(tmp_path, profile="ci", params=ReportParams(n_samples=2))
    assert {verdict.verdict for verdict in content.verdicts} == {"not_measured"}
    assert {value for _, value, _ in content.tiles} == {"not measured"}
    page = page_of(tmp_path)
    assert "<svg" not in page
    assert Balance(page).open == []
    body = re.sub(r"<(style|figcaption)>.*?</\1>", "", page, flags=re.DOTALL)
    assert re.findall(r">[^<]*\d[^<]*<", body) == [">– 10 not measured<"]


@pytest.mark.parametrize(
    "missing",
    [
        "audit_run",
        "audit_windows",
        "eval_bound",
        "eval_loss_parity",
        "eval_samples",
        "eval_speedup",
        "docs_gate",
        "pretrain",
        "code",
    ],
)
def test_a_page_without_one_report_still_shows_the_others(reports: Path, missing: str) -> None:
    (reports / missing).rename(reports.parent / f"{reports.name}-{missing}")
    page = page_of(reports)
    assert Balance(page).open == []
    assert "not measured" in page


DAMAGED = (
    "audit_run/diffusion/metrics.json",
    "audit_windows/metrics.json", "audit_windows/samples.json", "code/pretrain.json",
    "docs_gate/metrics.json", "eval_bound/by_canvas.csv", "eval_bound/by_position.csv",
    "eval_bound/by_time.csv", "eval_bound/metrics.json", "eval_loss_parity/by_time.csv",
    "eval_loss_parity/metrics.json",
    "eval_samples/metrics.json",
    "eval_speedup/metrics.json", "eval_speedup/samples.json", "pretrain/diffusion/loss.csv",
    "pretrain/autoregressive/metrics.json",
)  # fmt: skip


@pytest.mark.parametrize("file", DAMAGED)
@pytest.mark.parametrize("damage", ["half", "empty", "bytes", "folder"])
def test_a_damaged_report_is_not_measured_with_the_reason_and_hides_no_other(
    reports: Path, file: str, damage: str
) -> None:
    damaged = reports / file
    whole = damaged.read_bytes()
    damaged.unlink()
    if damage == "folder":
        damaged.mkdir()
    else:
        damaged.write_bytes(
            {"half": whole[: len(whole) * 2 // 3], "empty": b"", "bytes": b"\xff\xfe"}[damage]
        )
    place = file.partition("/")[0]
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=2))
    told = [x for x in content.verdicts if x.place.startswith(place) and x.reason]
    if file.endswith(".json") and damage != "folder":
        assert told
        assert {x.verdict for x in told} >= {"not_measured"}
    page = page_of(reports)
    assert Balance(page).open == []
    assert all(figure in page for figure in ("343,516,160", "<code>ci</code>"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("audit_run/diffusion/metrics.json", {"verdict": "pass", "first_failure": 3}),
        ("audit_windows/samples.json", {}),
        ("audit_windows/samples.json", {"val": 3}),
        ("audit_windows/samples.json", {"val": [{"text": 3}]}),
        ("eval_speedup/samples.json", {"samples": [{"decoder": "x"}]}),
        ("eval_speedup/samples.json", {"samples": [3]}),
        ("eval_samples/metrics.json", {"verdict": "pass"}),
        ("eval_samples/metrics.json", {"verdict": "pass", "rows": {"a": 3}}),
        ("eval_speedup/metrics.json", {"verdict": "pass"}),
        ("eval_speedup/metrics.json", {"verdict": "pass", "rows": [1], "held_out": {}}),
        ("eval_speedup/metrics.json", {"verdict": "ok"}),
        ("eval_loss_parity/metrics.json", {"verdict": "pass", "diffusion": "good"}),
        ("eval_loss_parity/metrics.json", {"diffusion": {"bound_nats_per_token": "low"}}),
        ("eval_bound/metrics.json", {"verdict": "pass", "diffusion": {}}),
        ("eval_bound/metrics.json", {"verdict": "pass", "diffusion": "good", "shares": {}}),
        ("docs_gate/metrics.json", {"verdict": ["pass"]}),
        ("docs_gate/metrics.json", {"verdict": "pass", "n_checked": 3}),
        ("code/pretrain.json", {"stage": "pretrain"}),
    ],
)
def test_a_report_of_the_wrong_shape_is_not_measured_with_the_reason(
    reports: Path, file: str, content: object
) -> None:
    (reports / file).write_text(json.dumps(content))
    found = read_content(reports, profile="ci", params=ReportParams(n_samples=2)).verdicts
    place = file.partition("/")[0]
    told = [x.reason for x in found if x.place.startswith(place) and x.verdict == "not_measured"]
    assert any(told), found
    page = page_of(reports)
    assert Balance(page).open == []
    assert "343,516,160" in page


def test_half_a_surrogate_pair_stops_no_page(reports: Path) -> None:
    (reports / "audit_windows/samples.json").write_text('{"val": [{"text": "a\\ud800b"}]}')
    assert "a?b" in page_of(reports)


def test_drawings_take_the_colours_of_the_page(reports: Path) -> None:
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=0))
    drawings = draw_figures(
        content.curves, content.bars, content.times, content.bound, content.marks
    )
    curves = {"bound_times", "bound_positions", "bound_canvases"}
    marks = {"samplers_forwards", "samplers_seconds"}
    assert set(drawings) == {"tokens", "flops", "parity", "times"} | curves | marks
    for svg in drawings.values():
        assert not re.search(r"#[0-9a-fA-F]{6}\b", svg)
        assert "var(--ink-soft)" in svg
        assert "font-family" not in svg


def test_marks_of_samplers_are_those_whose_nats_were_measured(reports: Path) -> None:
    marks = read_content(reports, profile="ci", params=ReportParams(n_samples=0)).marks
    assert marks.levels == {"the twin's samples": 2.875, "held-out text": 3.625}
    loop, text = marks.samplers
    assert (loop.stopping, loop.is_text, loop.costs) == (
        "mean_entropy",
        False,
        {"forwards": 0.5625},
    )
    assert (text.stopping, text.is_text) == ("never", True)
    assert text.costs == {"forwards": 0.5625, "seconds": 12.5}
    assert text.frontiers == {"forwards", "seconds"}


def test_a_rule_that_the_page_does_not_know_is_drawn_all_the_same(reports: Path) -> None:
    file = reports / "eval_samples" / "metrics.json"
    file.write_text(file.read_text().replace('"quota"', '"newer"').replace('"never"', '["odd"]'))
    assert (
        "newer"
        not in page_of(reports).partition("<h2>Quality of the samplers")[2].partition("<table")[0]
    )  # no key
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=0))
    assert [mark.acceptance for mark in content.marks.samplers] == ["newer", "newer"]


def test_the_curves_are_those_of_continuous_time_without_self_conditioning(reports: Path) -> None:
    bound = read_content(reports, profile="ci", params=ReportParams(n_samples=0)).bound
    assert list(bound.times) == [2.25, 2.125]
    assert bound.positions == bound.canvases
    assert bound.positions == {
        "diffusion": ([1.0, 2.0], [4.5, 4.25]),
        "autoregressive": ([1.0, 2.0], [3.0, 3.5]),
    }


@pytest.mark.parametrize(
    ("gap", "begins"),
    [
        (45.1, "No, not as trained here: the bound lies 45.1 % above"),
        (-2.0, "In likelihood yes: the bound lies 2.0 % below"),
    ],
)
def test_the_page_answers_the_question_in_a_sentence(
    reports: Path, gap: float, begins: str
) -> None:
    file = reports / "eval_loss_parity/metrics.json"
    metrics = json.loads(file.read_text())
    file.write_text(json.dumps({**metrics, "gap_percent": gap, "max_gap_percent": 10.0}))
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=0))
    assert content.answer.startswith(begins)
    file.unlink()
    content = read_content(reports, profile="ci", params=ReportParams(n_samples=0))
    assert content.answer.startswith("Not answered")


def test_the_page_links_the_audits_and_the_trace_of_a_run_that_was_not_finite(
    reports: Path,
) -> None:
    """A reader finds what lies beside the page; a run without a bad step has no trace to show."""
    audits = {f"./audit_run/{x}/index.html" for x in ("diffusion", "autoregressive")}
    assert audits == {x for x in Balance(page_of(reports)).asked if not x.startswith("#")}
    file = reports / "pretrain/diffusion/metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bad_steps": 3, "rollbacks": 1}))
    page = page_of(reports)
    trace = {f"./pretrain/diffusion/nonfinite/trace.{end}" for end in ("json", "svg")}
    assert audits | trace == {x for x in Balance(page).asked if not x.startswith("#")}
    assert "<td>bad steps</td><td>3</td>" in page


def test_a_page_drawn_after_dvc_holds_the_reports_against_its_record(reports: Path) -> None:
    """What the record tells to `make verdicts` it tells to a page that is drawn by hand."""
    file = reports / "eval_speedup/metrics.json"
    path = "reports/eval_speedup/metrics.json"
    root = reports / "checkout"
    root.mkdir()
    (root / "reports").symlink_to(reports)
    stage = {
        "outs": [{"path": path, "md5": hashlib.md5(file.read_bytes()).hexdigest()}],
        "params": {"params.yaml": {"eval_speedup": {"seed": 1}}},
    }
    record = Record(root=root, lock={"stages": {"eval_speedup": stage}}, params={})
    shown = ReportParams(n_samples=2)
    content = read_content(reports, profile="ci", params=shown, record=record)
    told = {x.place: x.reason for x in content.verdicts if x.verdict == "not_measured"}
    assert told == {"eval_speedup": "made with other values of `eval_speedup`; run `make repro`"}
    assert content.tables["speed"] is None
    assert set(content.samples) == {"held-out text"}


def test_figures_of_another_run_stand_nowhere_on_the_page(reports: Path) -> None:
    """A training that failed leaves no bound, speed, sample or audit of the run before it."""
    file = reports / "pretrain/diffusion/metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"verdict": "fail"}))
    page = page_of(reports)
    earlier = ("4.5000", "3.2500", "38.5", "2.31", " upon ", "head is tied", "too far apart",
               "4.3750", "-0.0625", ">3.875<", "trade:")  # fmt: skip
    assert [figure for figure in earlier if figure in page] == []
    assert "343,516,160" in page
    assert page.count("made from another run: pretrain.diffusion fails") == 5
    assert "Not answered" in page


def test_a_narrow_screen_stacks_what_an_audit_measured_and_expected() -> None:
    """A table of five columns is wider than a phone, and its last two say the most."""
    audit = (Path(reporting.__file__).parents[1] / "run_audit/page.html").read_text()
    checks = audit[audit.index('<table class="stack">') : audit.index("</table>")]
    assert re.findall(r'data-label="(\w+)"', checks) == ["measured", "expected"]
    narrow = page_style().partition("@media (max-width: 640px)")[2]
    assert re.search(r"\.stack tr \{ display: grid", narrow)
    assert "content: attr(data-label)" in narrow


def page_style() -> str:
    return Path(reporting.__file__).with_name("look.html").read_text()
