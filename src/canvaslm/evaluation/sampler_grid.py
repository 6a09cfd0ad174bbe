"""Which samplers stand on the grid of rules, steps and temperatures?"""

from dataclasses import dataclass

from canvaslm.evaluation.decoders import EVIDENCES
from canvaslm.evaluation.rules import acceptance_named, stopping_named
from canvaslm.evaluation.samples_params import EvalSamplesParams
from canvaslm.evaluation.speedup_params import AcceptanceName, StoppingName
from canvaslm.model.backbone import Backbone
from canvaslm.sampling.sampler import CanvasSampler


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One sampler, by what sets it apart from the others.

    Attributes:
        acceptance: name of the rule that chooses positions.
        stopping: name of the rule that ends a canvas.
        denoise_steps: the most steps of a canvas.
        temperatures: of a canvas's first and last step.
        is_reference: whether the others of its acceptance rule are held against its samples.
    """

    acceptance: AcceptanceName
    stopping: StoppingName
    denoise_steps: int
    temperatures: tuple[float, float]
    is_reference: bool

    def sampler(
        self, denoiser: Backbone, params: EvalSamplesParams, *, eot_id: int | None
    ) -> CanvasSampler:
        """Put the sampler together.

        Args:
            denoiser: the diffusion model.
            params: what all samplers share.
            eot_id: the id that ends a text; ``None`` where a text has no end.
        """
        start, end = self.temperatures
        return CanvasSampler(
            model=denoiser,
            acceptance=acceptance_named(self.acceptance, params),
            stopping=stopping_named(self.stopping, params),
            denoise_steps=self.denoise_steps,
            start_temperature=start,
            end_temperature=end,
            eot_id=eot_id,
            vocab_chunk=params.vocab_chunk,
            evidence=EVIDENCES[params.evidence],
        )


def grid_points(params: EvalSamplesParams) -> dict[str, GridPoint]:
    """List the samplers by id: ``acceptance/stopping/steps``, with temperatures but for the first.

    All rules and steps meet at the first temperatures. Each acceptance rule has its reference,
    which never stops early and takes ``reference_steps``. Every other pair of temperatures is tried
    once, with the first rules at the last number of steps.
    """
    usual = _pair(params.temperatures[0])
    points = {}

    def add(
        acceptance: AcceptanceName, stopping: StoppingName, steps: int, pair: tuple[float, float]
    ) -> None:
        name = f"{acceptance}/{stopping}/{steps}"
        is_usual = pair == usual
        points[name if is_usual else f"{name}@{pair[0]:g}-{pair[1]:g}"] = GridPoint(
            acceptance=acceptance,
            stopping=stopping,
            denoise_steps=steps,
            temperatures=pair,
            is_reference=is_usual and stopping == "never" and steps == params.reference_steps,
        )

    for acceptance in params.acceptances:
        for stopping in params.stoppings:
            for steps in params.denoise_steps:
                add(acceptance, stopping, steps, usual)
        add(acceptance, "never", params.reference_steps, usual)
    for other in params.temperatures[1:]:
        add(params.acceptances[0], params.stoppings[0], params.denoise_steps[-1], _pair(other))
    return points


def reference_of(point: GridPoint, points: dict[str, GridPoint]) -> str:
    """The id of the sampler whose samples a sampler's are held against."""
    return next(
        name
        for name, other in points.items()
        if other.is_reference and other.acceptance == point.acceptance
    )


def _pair(temperatures: list[float]) -> tuple[float, float]:
    start, end = temperatures
    return float(start), float(end)
