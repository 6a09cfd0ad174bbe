"""How thoroughly is a finished run audited? Nothing here imports torch."""

from typing import Literal

from pydantic import Field

from canvaslm.params import Params


class AuditRunParams(Params):
    """The section ``audit_run``."""

    seed: int = Field(ge=0, description="names the audit's own random draws")
    device: Literal["auto", "cpu", "cuda"] = Field(description="where the audit computes")
    n_windows: int = Field(ge=1, description="windows that a check takes its samples from")
    max_held_out_windows: int | None = Field(
        ge=1, description="held-out windows whose loss is judged, spread over the split; null: all"
    )
    overfit_steps: int = Field(ge=1, description="steps in which one window must be learned")
    overfit_nats: float = Field(gt=0, description="nats per target that counts as learned")
    overfit_learning_rate: float = Field(gt=0, description="the constant rate of that training")
