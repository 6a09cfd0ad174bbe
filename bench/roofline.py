"""Up to which batch is a canvas faster than one token a step on a GPU, by the roofline alone?

Nothing is timed here. A forward is taken to last as long as the longer of two things: its
arithmetic at the peak of the device, and its bytes (weights once, the cache of every row, the
logits out and back) at the rate of its memory (Williams, Waterman and Patterson 2009). That is the
least that a forward can take, for the twin and for a canvas alike, so what is computed is where the
gain ends when both are as good as they can be; ``bench/gpu_gates.py`` measures where they are.
"""

from dataclasses import dataclass

from harness import ROOT, begin, finish, parser

from canvaslm.layout import Layout
from canvaslm.measure import stream_flops
from canvaslm.model.shape import ModelParams, count_parameters
from canvaslm.params import compose, parse_section, read_yaml
from canvaslm.reporting.benches import Scalar

_BYTES = 2  # bfloat16
_STEPS = (4, 8, 16, 32)
_CONTEXT = 2048  # tokens before the canvas: the middle of a window
_MOST_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peak arithmetic in bfloat16 without sparsity, and the rate of memory, by the data sheet."""

    name: str
    flops_per_s: float
    bytes_per_s: float


DEVICES = (
    Device(name="A100-80GB", flops_per_s=312e12, bytes_per_s=2.039e12),
    Device(name="H100-SXM", flops_per_s=989e12, bytes_per_s=3.35e12),
    Device(name="H200-SXM", flops_per_s=989e12, bytes_per_s=4.8e12),
)


def main() -> None:
    """Compute, print and write."""
    options = parser(__doc__, "roofline", rounds=1).parse_args()
    begin(options)
    model, layout = _production()
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    for device in DEVICES:
        for n_steps in _STEPS:
            ends = _last_batch(device, model, layout, n_steps)
            gain = _gain(device, model, layout, n_steps, 1)
            name = f"roofline/{device.name}/steps{n_steps}"
            ratios[f"{name}/computed_gain_at_batch1"] = gain
            rows.append(
                {
                    "device": device.name,
                    "steps": n_steps,
                    "computed_gain_at_batch_1": gain,
                    "computed_gain_at_batch_8": _gain(device, model, layout, n_steps, 8),
                    "computed_gain_at_batch_32": _gain(device, model, layout, n_steps, 32),
                    "gain_ends_after_batch": ends,
                }
            )
    finish(options, rows=rows, ratios=ratios)


def _production() -> tuple[ModelParams, Layout]:
    """The shape of profile ``gpu_343m``."""
    file = ROOT / "configs/gpu_343m.yaml"
    values = compose(read_yaml(ROOT / "configs/base.yaml"), read_yaml(file), where=str(file))
    model = parse_section(values["model"], ModelParams, where="model")
    return model, parse_section(values["layout"], Layout, where="layout")


def _last_batch(device: Device, model: ModelParams, layout: Layout, n_steps: int) -> str:
    """The largest batch up to which canvases are faster, where there is one."""
    for rows in range(1, _MOST_ROWS):
        if _gain(device, model, layout, n_steps, rows) <= 1:
            return str(rows - 1) if rows > 1 else "none"
    return "does not end"


def _gain(device: Device, model: ModelParams, layout: Layout, n_steps: int, rows: int) -> float:
    """Tokens a second of canvases over those of the twin, for so many rows."""
    L, guesses = layout.canvas_tokens, model.self_conditioning != "off"
    step_s = _seconds(device, model, layout, rows=rows, tokens=L, scored=L, embeds_guess=guesses)
    read_s = _seconds(device, model, layout, rows=rows, tokens=L, scored=0, embeds_guess=False)
    twin_s = _seconds(
        device, model.twin(), layout, rows=rows, tokens=1, scored=1, embeds_guess=False
    )
    return L * twin_s / (n_steps * step_s + read_s)


def _seconds(
    device: Device,
    model: ModelParams,
    layout: Layout,
    *,
    rows: int,
    tokens: int,
    scored: int,
    embeds_guess: bool,
) -> float:
    """The longer of arithmetic and bytes of one forward of ``rows`` times ``tokens``."""
    V, D = layout.vocab_size, model.width
    flops = rows * stream_flops(
        model,
        tokens=tokens,
        mean_keys=_CONTEXT + tokens,
        scored_tokens=scored,
        vocab_size=V,
    )
    table = _BYTES * V * D
    weights = _BYTES * count_parameters(model, layout) - (0 if scored else table)
    cache = _BYTES * 2 * model.n_layers * model.n_kv_heads * model.head_width * _CONTEXT
    moved = weights + rows * (cache + 2 * _BYTES * scored * V)
    if embeds_guess:  # softmax(logits) @ table of the step before: the logits again, and the table
        flops += 2.0 * rows * scored * V * D * 2
        moved += table
    return max(flops / device.flops_per_s, moved / device.bytes_per_s)


if __name__ == "__main__":
    main()
