from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from canvaslm.evaluation.decoding_task import Task
from canvaslm.evaluation.frontier import (
    Standing,
    forwards_per_token,
    seconds_per_token,
    stand,
    tokens_with_end,
    verdict_of_standings,
)
from canvaslm.evaluation.sample_quality import SampleQuality, judge_samples
from canvaslm.evaluation.speedup import SpeedupRow, count_rows, judge_rows
from canvaslm.layout import Layout
from canvaslm.measure import Timing
from canvaslm.reporting.progress import untracked
from parrots import Parrot, knowing_twin

EOT = 40
LAYOUT = Layout(canvas_tokens=4, canvases_per_window=20, vocab_size=41)
TASK = Task(prompts=[[1, 2, 3], [4, 5, 6]], new_tokens=64, batch_rows=2, seed=1)
USUAL: dict[str, Any] = {
    "twin_nats_per_token": 3.5,
    "twin_nats_standard_error": 0.1,
    "unigram_entropy_nats": 4.0,
    "distinct_1": 0.8,
    "distinct_2": 0.9,
    "repetition_4": 0.1,
    "n_tokens": 64,
    "n_samples": 1,
}
HELD_OUT = SampleQuality(**USUAL)


def row(
    *,
    forwards: int = 32,
    seconds: float | None = None,
    ended_by: dict[str, int] | None = None,
    **quality: Any,
) -> SpeedupRow:
    """A sampler that wrote 64 tokens of the quality of held-out text, but for what is said."""
    return SpeedupRow(
        n_rows=1,
        new_tokens=64,
        tokens=64,
        forwards=forwards,
        prefill_forwards=1,
        encoding_forwards=5,
        token_forwards=forwards * 16,
        batch_forwards=forwards,
        tokens_per_forward=64 / forwards,
        tokens_per_forward_after_prompt=64 / (forwards - 1),
        verifications=0,
        accepted=0,
        ended_by=ended_by or {"length": 1},
        timing=None if seconds is None else Timing(rounds_s=(seconds,)),
        quality=SampleQuality(**(USUAL | quality)),
    )


def standings_of(rows: dict[str, SpeedupRow]) -> dict[str, Standing]:
    return stand(rows, HELD_OUT, min_diversity_share=0.5, max_excess_nats=1.0)


# BR-67
def test_64_copies_of_one_token_are_a_trade_whatever_their_nats_and_forwards_are() -> None:
    """The repeating sampler is the best by nats and by forwards, and neither helps it."""
    twin = knowing_twin(LAYOUT)
    draws = np.random.default_rng(0)
    text = draws.permuted(np.tile(np.arange(16), 4)).tolist()
    decoders: Any = {
        "stuck": Parrot(twin, [7] * 64, canvases=16, forwards=2),
        "sane": Parrot(twin, text, canvases=16, forwards=20),
    }
    rows, samples = count_rows(decoders, TASK, track=untracked)
    written = [draws.permuted(text).tolist() for _ in TASK.prompts]
    held_out = judge_samples(twin, TASK.prompts, written, bos_id=EOT)
    limits = {"min_diversity_share": 0.5, "max_excess_nats": 1.0}
    rows = judge_rows(rows, samples, TASK, twin=twin, bos_id=EOT, held_out=held_out, **limits)
    stuck, sane = (rows[name].quality for name in ("stuck", "sane"))
    assert stuck is not None
    assert sane is not None
    assert (stuck.unigram_entropy_nats, stuck.distinct_1) == (0.0, 1 / 64)
    assert stuck.repetition_4 == 60 / 61
    assert stuck.twin_nats_per_token is not None
    assert sane.twin_nats_per_token is not None
    assert stuck.twin_nats_per_token < sane.twin_nats_per_token
    found = stand(rows, held_out, **limits)
    assert found["stuck"].told == (
        "trade: wins twin_nats_per_token, forwards_per_token by losing unigram_entropy_nats, "
        "distinct_1, distinct_2, repetition_4"
    )
    assert found["sane"].word == "frontier"
    assert verdict_of_standings({"stuck": found["stuck"]})[0] == "fail"
    verdict, reason = verdict_of_standings(found)
    assert (verdict, reason) == (
        "pass", "1 of 2 samplers write text; on the frontier of nats and forwards: sane",
    )  # fmt: skip


def test_noise_wins_diversity_and_forwards_by_losing_nats() -> None:
    found = standings_of(
        {
            "noise": row(forwards=4, twin_nats_per_token=7.0, distinct_1=0.99, repetition_4=0.0),
            "text": row(),
        }
    )
    assert found["noise"].told == (
        "trade: wins distinct_1, repetition_4, forwards_per_token by losing twin_nats_per_token"
    )
    assert found["text"].word == "frontier"


def test_what_a_trade_has_won_is_told_against_those_that_write_text() -> None:
    """Its nats are more than people's and less than those of every text of a sampler."""
    rows = {
        "poor": row(forwards=64, twin_nats_per_token=3.9, distinct_1=0.3),
        "poorer": row(forwards=64, twin_nats_per_token=4.1, distinct_1=0.3),
        "text": row(twin_nats_per_token=4.0),
    }
    found = standings_of(rows)
    assert found["poor"].told == "trade: wins twin_nats_per_token by losing distinct_1"
    assert found["poorer"].told == "trade: wins nothing by losing distinct_1"
    alone = standings_of({"poor": rows["poor"]})
    assert alone["poor"].told == "trade: wins nothing by losing distinct_1"


@pytest.mark.parametrize(
    ("figure", "limit"),
    [("unigram_entropy_nats", 2.0), ("distinct_1", 0.4), ("distinct_2", 0.45)],
)
def test_one_diversity_alone_makes_a_trade(figure: str, limit: float) -> None:
    for value, word in ((limit * 1.01, "frontier"), (limit * 0.99, "trade")):
        quality: dict[str, Any] = {"twin_nats_per_token": 1.0, figure: value}
        found = standings_of({"a": row(**quality)})["a"]
        assert found.word == word
        assert found.lost == (() if word == "frontier" else (figure,))


def test_repetition_above_what_the_share_leaves_makes_a_trade() -> None:
    """Held-out text repeats a tenth, so half of the other nine tenths must be fresh."""
    words = [standings_of({"a": row(repetition_4=x)})["a"].word for x in (0.54, 0.56)]
    assert words == ["frontier", "trade"]


def test_the_frontier_is_what_no_text_beats_in_nats_for_no_more_forwards() -> None:
    found = standings_of(
        {
            "cheap": row(forwards=16, twin_nats_per_token=4.0),
            "good": row(forwards=64, twin_nats_per_token=3.0),
            "better": row(forwards=80, twin_nats_per_token=2.9),
            "late": row(forwards=96, twin_nats_per_token=3.1),
            "worse": row(forwards=16, twin_nats_per_token=4.1),
            "twice": row(forwards=16, twin_nats_per_token=4.0),
        }
    )
    assert {name: x.dominated_by for name, x in found.items()} == {
        "cheap": None, "good": None, "better": None, "twice": None,
        "late": "better",  # and by good, whose nats are more
        "worse": "cheap",
    }  # fmt: skip
    assert {x.word for x in found.values()} == {"frontier", "dominated"}
    assert found["late"].told == "dominated by better"


def test_a_trade_pushes_no_text_off_the_frontier() -> None:
    """Fewer nats for fewer forwards, and no text."""
    found = standings_of({"loop": row(forwards=8, twin_nats_per_token=0.1, distinct_1=0.1),
                          "text": row(forwards=64)})  # fmt: skip
    assert (found["loop"].word, found["text"].word) == ("trade", "frontier")


def test_seconds_have_a_frontier_of_their_own() -> None:
    found = standings_of(
        {
            "few": row(forwards=16, seconds=4.0, twin_nats_per_token=3.6),
            "many": row(forwards=32, seconds=2.0, twin_nats_per_token=3.5),
            "untimed": row(forwards=64, twin_nats_per_token=3.4),
        }
    )
    assert {name: x.word for name, x in found.items()} == dict.fromkeys(found, "frontier")
    assert {name: x.is_on_frontier_of_seconds for name, x in found.items()} == {
        "few": False, "many": True, "untimed": None,
    }  # fmt: skip


def test_a_text_that_ends_early_does_not_win_forwards_by_being_short() -> None:
    """Both take two forwards for each token, though one has written half as much."""
    short = replace(row(forwards=66), tokens=32, ended_by={"end_of_text": 1})
    assert tokens_with_end(short) == 33
    assert forwards_per_token(short) == forwards_per_token(row(forwards=128)) == 2.0


def test_what_made_no_token_is_not_divided_by_and_not_judged() -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("twin_nats_per_token", "unigram_entropy_nats", "distinct_1")
    )
    silent = replace(row(seconds=1.0, **nothing), tokens=0)
    assert forwards_per_token(silent) is seconds_per_token(silent) is None
    found = standings_of({"silent": silent})
    assert found["silent"].word == "not_measured"
    assert verdict_of_standings(found)[0] == "not_measured"


# BR-76
def test_numbers_that_are_not_finite_fail_whatever_the_rest_is() -> None:
    found = standings_of({"broken": row(ended_by={"not_finite": 1}, twin_nats_per_token=0.5),
                          "text": row()})  # fmt: skip
    assert (found["broken"].word, found["text"].word) == ("not_finite", "frontier")
    assert verdict_of_standings(found) == ("fail", "not finite: broken")
