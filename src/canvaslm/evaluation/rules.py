"""Which rule does a name in the params stand for?"""

from typing import Protocol

from canvaslm.evaluation.speedup_params import AcceptanceName, StoppingName
from canvaslm.sampling.acceptance import Acceptance, EntropyBound, Quota, UnchangedOrStronger
from canvaslm.sampling.stopping import MeanEntropy, Never, StableAndConfident, Stopping


class RuleKnobs(Protocol):
    """What a section says of all rules, whichever of them it takes."""

    @property
    def entropy_bound(self) -> float:
        """Joint entropy accepted by ``entropy_bound``, nats."""
        ...

    @property
    def quota_threshold(self) -> float:
        """Confidence above which ``quota`` accepts early."""
        ...

    @property
    def stop_entropy(self) -> float:
        """Mean entropy of a canvas that stops, nats."""
        ...

    @property
    def stop_patience(self) -> int:
        """Steps running for ``mean_entropy``, extra repeats for ``stable_and_confident``."""
        ...


def acceptance_named(name: AcceptanceName, knobs: RuleKnobs) -> Acceptance:
    """The rule of a name: which positions keep their token after a step."""
    rules: dict[AcceptanceName, Acceptance] = {
        "unchanged_or_stronger": UnchangedOrStronger(),
        "entropy_bound": EntropyBound(bound=knobs.entropy_bound),
        "quota": Quota(threshold=knobs.quota_threshold),
    }
    return rules[name]


def stopping_named(name: StoppingName, knobs: RuleKnobs) -> Stopping:
    """The rule of a name: when a canvas is done before its last step."""
    threshold, patience = knobs.stop_entropy, knobs.stop_patience
    rules: dict[StoppingName, Stopping] = {
        "never": Never(),
        "mean_entropy": MeanEntropy(threshold=threshold, patience=patience),
        "stable_and_confident": StableAndConfident(threshold=threshold, patience=patience),
    }
    return rules[name]
