from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from canvaslm.evaluation.decoding_task import Task
from canvaslm.evaluation.frontier import tokens_with_end
from canvaslm.evaluation.sampler_grid import grid_points, reference_of
from canvaslm.evaluation.samples_params import EvalSamplesParams
from canvaslm.evaluation.samples_report import run_timed
from canvaslm.evaluation.speedup import SpeedupRow, count_rows
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.reporting.progress import untracked
from canvaslm.sampling.acceptance import EntropyBound, Quota, UnchangedOrStronger
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.stopping import MeanEntropy, Never, StableAndConfident
from shapes import tiny_shape

LAYOUT = Layout(canvas_tokens=4, canvases_per_window=20, vocab_size=41)
KNOBS: dict[str, Any] = {
    "seed": 1,
    "device": "cpu",
    "n_prompts": 1,
    "batch_rows": 1,
    "prompt_tokens": 4,
    "new_tokens": 64,
    "acceptances": ["entropy_bound", "quota", "unchanged_or_stronger"],
    "stoppings": ["never", "mean_entropy", "stable_and_confident"],
    "denoise_steps": [2, 4],
    "reference_steps": 8,
    "temperatures": [[0.8, 0.4], [1.0, 0.5]],
    "entropy_bound": 0.1,
    "quota_threshold": 0.9,
    "stop_entropy": 0.005,
    "stop_patience": 1,
    "evidence": "cavity",
    "autoregressive_temperature": 0.8,
    "min_diversity_share": 0.5,
    "max_excess_nats": 1.0,
    "vocab_chunk": 16,
}
PARAMS = EvalSamplesParams.model_validate(KNOBS)


@pytest.fixture(scope="module")
def networks() -> tuple[Backbone, Backbone]:
    shape = tiny_shape(n_layers=1, vocab_multiple=1)
    denoiser, twin = Backbone(shape, LAYOUT).eval(), Backbone(shape.twin(), LAYOUT).eval()
    for network in (denoiser, twin):
        initialise(network, 0)
    return denoiser, twin


def test_all_rules_and_steps_meet_once_and_other_temperatures_are_tried_at_one_place() -> None:
    points = grid_points(PARAMS)
    full = {f"{a}/{s}/{n}" for a in PARAMS.acceptances for s in PARAMS.stoppings for n in (2, 4)}
    references = {f"{a}/never/8" for a in PARAMS.acceptances}
    assert set(points) == full | references | {"entropy_bound/never/4@1-0.5"}
    assert {name for name, point in points.items() if point.is_reference} == references
    assert reference_of(points["quota/mean_entropy/2"], points) == "quota/never/8"
    assert reference_of(points["entropy_bound/never/4@1-0.5"], points) == "entropy_bound/never/8"


def test_a_reference_that_is_on_the_grid_is_no_second_sampler() -> None:
    params = EvalSamplesParams.model_validate(KNOBS | {"reference_steps": 4})
    points = grid_points(params)
    assert len(points) == len(grid_points(PARAMS)) - 3
    assert points["quota/never/4"].is_reference
    assert not points["entropy_bound/never/4@1-0.5"].is_reference


def test_a_sampler_is_what_its_id_says(networks: tuple[Backbone, Backbone]) -> None:
    samplers = {
        name: point.sampler(networks[0], PARAMS, eot_id=None)
        for name, point in grid_points(PARAMS).items()
    }
    assert samplers["entropy_bound/never/2"].acceptance == EntropyBound(bound=0.1)
    assert samplers["quota/never/2"].acceptance == Quota(threshold=0.9)
    changed = samplers["unchanged_or_stronger/mean_entropy/4"]
    assert changed.acceptance == UnchangedOrStronger()
    assert changed.stopping == MeanEntropy(threshold=0.005, patience=1)
    assert changed.denoise_steps == 4
    sure = samplers["quota/stable_and_confident/2"]
    assert sure.stopping == StableAndConfident(threshold=0.005, patience=1)
    assert samplers["quota/never/8"].stopping == Never()
    warm = samplers["entropy_bound/never/4@1-0.5"]
    assert (warm.start_temperature, warm.end_temperature) == (1.0, 0.5)
    assert (sure.start_temperature, sure.end_temperature) == (0.8, 0.4)


# BR-69
def test_an_end_of_text_at_place_5_of_64_is_six_tokens_for_every_sampler_and_the_twin(
    networks: tuple[Backbone, Backbone],
) -> None:
    """Each is told that the sixth token that it draws ends a text; what it went on with is cut."""
    denoiser, twin = networks
    hot = EvalSamplesParams.model_validate(
        KNOBS | {"denoise_steps": [2], "reference_steps": 3, "temperatures": [[9.0, 9.0]]}
    )

    def decoders(eot_id: int | None) -> dict[str, Any]:
        some = {"temperature": 2.0, "bos_id": 40, "eot_id": eot_id}
        found: dict[str, Any] = {"autoregressive": AutoregressiveSampler(model=twin, **some)}
        return found | {
            name: point.sampler(denoiser, hot, eot_id=eot_id)
            for name, point in grid_points(hot).items()
        }

    def runs(name: str, decoder: Any) -> Iterator[tuple[Task, SpeedupRow, list[int]]]:
        for seed in range(99):
            task = Task(prompts=[[1, 2, 3, 4]], new_tokens=64, batch_rows=1, seed=seed)
            rows, made = count_rows({name: decoder}, task, track=untracked)
            yield task, rows[name], made[name][0].ids

    for name, decoder in decoders(None).items():
        task, whole, ids = next(x for x in runs(name, decoder) if x[2].index(x[2][5]) == 5)
        assert tokens_with_end(whole) == len(ids) == 64
        rows, cut = count_rows({name: decoders(ids[5])[name]}, task, track=untracked)
        assert cut[name][0].ids == ids[:5]
        assert tokens_with_end(rows[name]) == 6
        assert rows[name].forwards < whole.forwards


def test_seconds_are_of_the_run_that_was_counted(networks: tuple[Backbone, Backbone]) -> None:
    task = Task(prompts=[[1, 2, 3, 4]] * 2, new_tokens=4, batch_rows=1, seed=1)
    point = grid_points(PARAMS)["quota/never/2"]
    runs: list[int] = []

    class Counting:
        model = networks[0]

        def generate(self, prompt_ids: Any, max_new_tokens: int | None, seeds: Any) -> Any:
            runs.append(len(prompt_ids))
            sampler = point.sampler(networks[0], PARAMS, eot_id=None)
            return sampler.generate(prompt_ids, max_new_tokens, seeds)

    rows, samples = run_timed({"a": Counting()}, task, track=untracked)
    assert runs == [1, 1, 1]  # a warm batch, then the two of the task
    assert rows["a"].batch_forwards == 2 * (1 + 2 + 1)
    assert rows["a"].timing is not None
    assert rows["a"].timing.median_s > 0
    assert len(samples["a"]) == 2
    assert torch.tensor([sample.ids for sample in samples["a"]]).shape == (2, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"denoise_steps": [4, 4]}, "different entries"),
        ({"temperatures": [[0.8]]}, "at least 2"),
        ({"stop_patience": 0}, "mean_entropy"),
        ({"acceptances": []}, "at least 1"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EvalSamplesParams.model_validate(KNOBS | change)
