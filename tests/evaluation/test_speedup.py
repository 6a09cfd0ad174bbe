import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from canvaslm.evaluation.decoders import Decoder, build_companion_decoders, build_decoders
from canvaslm.evaluation.decoding_task import Task
from canvaslm.evaluation.sample_quality import judge_samples
from canvaslm.evaluation.speedup import (
    SpeedupRow,
    count_rows,
    judge_rows,
    time_rows,
    verdict_of,
)
from canvaslm.evaluation.speedup_params import EvalSpeedupParams
from canvaslm.layout import Layout
from canvaslm.measure import Timing
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.reporting.progress import untracked
from canvaslm.sampling.evidence import Cavity, Posterior
from canvaslm.sampling.request import Generated
from canvaslm.sampling.sampler import CanvasSampler
from parrots import Parrot, knowing_twin
from shapes import tiny_shape

EOT = 40
LAYOUT = Layout(canvas_tokens=4, canvases_per_window=8, vocab_size=41)
SHAPE = tiny_shape(
    n_layers=1, n_heads=2, n_kv_heads=1, head_width=8, ffn_width=16, vocab_multiple=1
)
PARAMS = EvalSpeedupParams(
    seed=1,
    device="cpu",
    n_prompts=3,
    batch_rows=2,
    prompt_tokens=3,
    new_tokens=8,
    short_new_tokens=4,
    rounds=2,
    warmup_rounds=1,
    entropy_bound=0.1,
    stop_entropy=0.005,
    stop_patience=1,
    evidence="cavity",
    start_temperature=0.8,
    end_temperature=0.4,
    autoregressive_temperature=0.8,
    draft_steps=2,
    draft_temperature=0.8,
    min_diversity_share=0.5,
    max_excess_nats=1.0,
    vocab_chunk=16,
)
TASK = Task(prompts=[[1, 2, 3], [4, 5, 6], [7, 8, 9]], new_tokens=8, batch_rows=2, seed=1)


@pytest.fixture(scope="module")
def networks() -> tuple[Backbone, Backbone]:
    denoiser, twin = Backbone(SHAPE, LAYOUT).eval(), Backbone(SHAPE.twin(), LAYOUT).eval()
    for network in (denoiser, twin):
        initialise(network, 0)
    return denoiser, twin


@pytest.fixture(scope="module")
def decoders(networks: tuple[Backbone, Backbone]) -> dict[str, Decoder]:
    return build_decoders(*networks, PARAMS, eot_id=None, bos_id=EOT)


Counted = tuple[dict[str, SpeedupRow], dict[str, list[Generated]]]


@pytest.fixture(scope="module")
def counted(decoders: dict[str, Decoder]) -> Counted:
    return count_rows(decoders, TASK, track=untracked)


def test_rows_are_counted_alike(counted: Counted) -> None:
    rows, samples = counted
    assert list(rows) == ["fixed_16", "fixed_32", "adaptive_32", "autoregressive"]
    # Two canvases of 4: 1 + canvases·(steps + 1) forwards for each of three prompts.
    for name, steps in (("fixed_16", 16), ("fixed_32", 32)):
        row = rows[name]
        assert (row.n_rows, row.tokens, row.forwards) == (3, 24, 3 * (1 + 2 * (steps + 1)))
        assert row.encoding_forwards == 3 * (1 + 2)
        assert row.token_forwards == 3 * (3 + 2 * (steps + 1) * 4)
        assert row.batch_forwards == 2 * (1 + 2 * (steps + 1))  # batches of 2 and 1
        assert row.tokens_per_forward == 24 / row.forwards
        assert row.tokens_per_forward_after_prompt == pytest.approx(4 / (steps + 1))
    twin = rows["autoregressive"]
    assert (twin.tokens, twin.forwards, twin.batch_forwards) == (24, 24, 16)
    assert twin.tokens_per_forward == twin.tokens_per_forward_after_prompt == 1.0
    assert rows["adaptive_32"].forwards <= rows["fixed_32"].forwards
    assert all(len(made) == 3 for made in samples.values())


def test_rows_of_a_companion_are_counted_alike(
    networks: tuple[Backbone, Backbone], counted: Counted
) -> None:
    decoders = build_companion_decoders(networks[0], PARAMS, eot_id=None, bos_id=EOT)
    assert list(decoders) == ["verified", "companion"]
    assert {decoder.model for decoder in decoders.values()} == {networks[0]}
    rows, samples = count_rows(decoders, TASK, track=untracked)
    verified, companion = rows["verified"], rows["companion"]
    assert (companion.tokens, companion.forwards, companion.verifications) == (24, 24, 0)
    assert companion.token_forwards == 3 * (3 + 7)  # no end of text before the prompt
    assert companion.accepted_per_forward is companion.accepted_per_verification is None
    made = samples["verified"]
    n_rounds = sum(row.canvases for row in made)
    n_single = sum((row.forwards - 1) % 3 for row in made)
    assert (verified.tokens, verified.verifications) == (24, n_rounds)
    assert verified.forwards == 3 + n_rounds * (2 + 1) + n_single
    assert verified.accepted == sum(row.accepted for row in made) == 24 - n_rounds - n_single
    assert verified.accepted_per_forward == verified.accepted / verified.forwards
    assert verified.accepted_per_verification == verified.accepted / n_rounds
    assert verified.tokens_per_forward_after_prompt == 24 / (verified.forwards - 3)
    assert counted[0]["fixed_16"].accepted_per_forward is None


# BR-69
def test_tokens_after_the_end_of_a_verified_text_count_for_nobody(
    networks: tuple[Backbone, Backbone],
) -> None:
    def count(eot_id: int | None) -> tuple[SpeedupRow, list[Generated]]:
        decoders = build_companion_decoders(networks[0], PARAMS, eot_id=eot_id, bos_id=EOT)
        rows, samples = count_rows({"verified": decoders["verified"]}, TASK, track=untracked)
        return rows["verified"], samples["verified"]

    whole, made = count(None)
    end = made[0].ids[5]
    row, cut = count(end)
    expected = [x.ids[: x.ids.index(end)] if end in x.ids else x.ids for x in made]
    assert [x.ids for x in cut] == expected
    assert row.tokens == sum(len(ids) for ids in expected) < whole.tokens == 24
    assert row.accepted <= row.tokens
    assert row.ended_by["end_of_text"] >= 1


# BR-69
def test_tokens_after_the_end_of_text_count_for_nobody(
    networks: tuple[Backbone, Backbone], counted: Counted
) -> None:
    for name in ("fixed_16", "autoregressive"):
        made = counted[1][name]
        end = made[0].ids[5]
        ending = build_decoders(*networks, PARAMS, eot_id=end, bos_id=EOT)
        rows, cut = count_rows({name: ending[name]}, TASK, track=untracked)
        expected = [row.ids[: row.ids.index(end)] if end in row.ids else row.ids for row in made]
        assert [row.ids for row in cut[name]] == expected
        assert rows[name].tokens == sum(len(ids) for ids in expected) < 24
        assert rows[name].ended_by["end_of_text"] >= 1


def test_samples_do_not_depend_on_the_size_of_batches(decoders: dict[str, Decoder]) -> None:
    together, alone = (
        dataclasses.replace(TASK, new_tokens=4, batch_rows=batch_rows) for batch_rows in (3, 1)
    )
    for name in ("fixed_16", "autoregressive"):
        assert together.run(decoders[name]) == alone.run(decoders[name])


def test_speed_is_tokens_over_the_median_round(decoders: dict[str, Decoder]) -> None:
    some = {name: decoders[name] for name in ("fixed_16", "autoregressive")}
    task = dataclasses.replace(TASK, new_tokens=4, batch_rows=3)
    rows, _ = count_rows(some, task, track=untracked)
    assert rows["fixed_16"].tokens_per_second is None
    timed = time_rows(rows, some, task, rounds=2, warmup_rounds=1)
    for name, row in timed.items():
        assert row.timing is not None
        assert len(row.timing.rounds_s) == 2
        assert dataclasses.replace(row, timing=None) == rows[name]
    known = dataclasses.replace(rows["fixed_16"], timing=Timing(rounds_s=(2.0, 4.0, 9.0)))
    assert known.tokens_per_second == 12 / 4.0


@pytest.fixture(scope="module")
def knowing() -> Backbone:
    return knowing_twin(LAYOUT)


# BR-67
def test_row_that_repeats_itself_or_reads_as_noise_fails_the_comparison_by_name(
    networks: tuple[Backbone, Backbone], knowing: Backbone
) -> None:
    uniform = np.random.default_rng(0).integers(40, size=8).tolist()
    decoders: dict[str, Decoder] = {
        "sane": Parrot(networks[0], range(8), canvases=2),
        "stuck": Parrot(networks[0], [7] * 8, canvases=2),
        "random": Parrot(networks[0], uniform, canvases=2),
    }
    rows, samples = count_rows(decoders, TASK, track=untracked)
    assert verdict_of(rows) == ("not_measured", "not judged: sane, stuck, random")
    written = [[1, 2, 3, 4, 5, 1, 7, 6]] * 3
    held_out = judge_samples(knowing, TASK.prompts, written, bos_id=EOT)
    judged = judge_rows(
        rows,
        samples,
        TASK,
        twin=knowing,
        bos_id=EOT,
        held_out=held_out,
        min_diversity_share=0.5,
        max_excess_nats=1.0,
    )
    flags = {name: (row.is_repetitive, row.is_noise) for name, row in judged.items()}
    assert flags == {"sane": (False, False), "stuck": (True, False), "random": (False, True)}
    verdict, reason = verdict_of(judged)
    assert verdict == "fail"
    quality = judged["random"].quality
    assert quality is not None
    assert reason == (
        f"stuck repeats itself; random reads as noise ({quality.twin_nats_per_token:.3g} nats per "
        "token)"
    )
    assert verdict_of({"sane": judged["sane"]})[0] == "pass"


def test_a_pass_says_that_texts_were_judged_and_what_the_speed_is(
    networks: tuple[Backbone, Backbone],
) -> None:
    """A decoder slower than the twin passes for its texts, and is not taken for a speed-up."""
    decoders: dict[str, Decoder] = {
        name: Parrot(networks[0], range(8), canvases=2)
        for name in ("autoregressive", "companion", "fixed_16")
    }
    counted, _ = count_rows(decoders, TASK, track=untracked)
    judged = {
        name: dataclasses.replace(row, is_repetitive=False, is_noise=False)
        for name, row in counted.items()
    }
    verdict, reason = verdict_of(judged)
    assert (verdict, reason.rpartition("; ")[2]) == ("pass", "speed was not measured")
    timed = {
        name: dataclasses.replace(row, timing=Timing(rounds_s=(seconds,)))
        for (name, row), seconds in zip(judged.items(), (1.0, 0.5, 4.0), strict=True)
    }
    verdict, reason = verdict_of(timed)
    assert verdict == "pass"
    assert reason.startswith("the texts were judged, not the speed: ")
    assert reason.endswith("fixed_16, runs at 0.25 times the twin's speed")


@pytest.mark.parametrize("evidence", ["posterior", "cavity"])
def test_evidence_is_what_the_params_say(
    networks: tuple[Backbone, Backbone], evidence: str
) -> None:
    params = PARAMS.model_copy(update={"evidence": evidence})
    decoders = build_decoders(*networks, params, eot_id=None, bos_id=EOT)
    for name in ("fixed_16", "fixed_32", "adaptive_32"):
        sampler = decoders[name]
        assert isinstance(sampler, CanvasSampler)
        assert sampler.evidence == (Cavity() if evidence == "cavity" else Posterior())


def test_a_row_that_made_nothing_is_not_divided_by(networks: tuple[Backbone, Backbone]) -> None:
    rows, _ = count_rows({"mute": Parrot(networks[0], [], canvases=0)}, TASK, track=untracked)
    assert rows["mute"].tokens_per_forward == 0.0
    assert rows["mute"].tokens_per_forward_after_prompt == 0.0


# BR-76
def test_a_decoder_whose_numbers_are_not_finite_fails_the_comparison(
    networks: tuple[Backbone, Backbone],
) -> None:
    denoiser, twin = (copy.deepcopy(network) for network in networks)
    with torch.no_grad():
        denoiser.final_norm.weight[0] = math.nan
    rows, _ = count_rows(
        build_decoders(denoiser, twin, PARAMS, eot_id=None, bos_id=EOT), TASK, track=untracked
    )
    verdict, reason = verdict_of(rows)
    assert verdict == "fail"
    assert "fixed_16 ended" in reason
    assert "not finite" in reason
    assert "autoregressive" not in reason
