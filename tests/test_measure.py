import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from canvaslm.layout import Layout
from canvaslm.measure import (
    ForwardCounter,
    Timing,
    interleaved_seconds,
    seconds,
    stream_flops,
)
from canvaslm.model.shape import count_parameters
from shapes import PRODUCTION

CPU = torch.device("cpu")


class _SlowDevice:
    """Queues work at once; waiting for it takes as long as the work does."""

    def __init__(self, work_s: float) -> None:
        self.work_s = work_s
        self.queued = 0

    def run(self) -> None:
        self.queued += 1

    def wait(self, device: torch.device) -> None:
        time.sleep(self.work_s * self.queued)
        self.queued = 0


# BR-68
def test_seconds_include_the_wait_for_the_device_and_not_work_queued_before() -> None:
    slow = _SlowDevice(0.05)
    slow.run()  # queued before the timer starts
    elapsed_s = seconds(slow.run, device=CPU, wait=slow.wait)
    assert 0.05 <= elapsed_s < 0.095


def test_rounds_are_interleaved_rotated_and_warmed_up() -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    timings = interleaved_seconds(
        {name: work(name) for name in "abc"}, device=CPU, rounds=3, warmup_rounds=1
    )
    assert "".join(order) == "abcbcacababc"
    assert {name: len(timing.rounds_s) for name, timing in timings.items()} == dict.fromkeys(
        "abc", 3
    )


def test_timing_tells_the_middle_and_both_ends() -> None:
    for rounds_s in itertools.permutations((1.0, 2.0, 9.0)):
        timing = Timing(rounds_s=rounds_s)
        assert (timing.median_s, timing.fastest_s, timing.slowest_s) == (2.0, 1.0, 9.0)


PEAKS = """
import torch
from canvaslm.measure import peak_bytes

def work():
    torch.ones(2**28, dtype=torch.uint8)

for run in (lambda: None, work, lambda: None):
    print(peak_bytes(run, device=torch.device("cpu")))
"""


def test_peak_bytes_sees_memory_that_is_gone_afterwards() -> None:
    """In a process of its own: this one's heap may have been told to keep what is freed."""
    told = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    if "None" in told.stdout:
        pytest.skip("this kernel does not let a process set back its high-water mark")
    idle, busy, again = map(int, told.stdout.split())
    assert busy - idle > 0.9 * 2**28
    assert busy - again > 0.9 * 2**28


def test_counter_counts_calls_and_tokens_and_leaves_no_trace() -> None:
    module = nn.Linear(3, 2)
    with ForwardCounter(module) as counter:
        module(torch.zeros(4, 5, 3))
        module(input=torch.zeros(2, 7, 3))
    module(torch.zeros(1, 1, 3))
    assert (counter.forwards, counter.tokens) == (2, 4 * 5 + 2 * 7)
    assert not module._forward_pre_hooks


def test_flops_are_twice_the_matrix_parameters_for_each_token() -> None:
    layout = Layout(canvas_tokens=256, canvases_per_window=16, vocab_size=50257)
    plain = PRODUCTION.model_copy(
        update={"bias": False, "time_width": 0, "self_conditioning": "off"}
    )
    norms = 1024 * (2 * 24 + 1)
    matrices = count_parameters(plain, layout) - norms  # the tied head once, as it is used
    flops = stream_flops(PRODUCTION, tokens=1, mean_keys=0, scored_tokens=1, vocab_size=50257)
    assert flops == 2 * matrices


def test_flops_of_attention_count_the_keys_that_are_seen() -> None:
    def attention(tokens: int, mean_keys: float) -> float:
        with_keys = stream_flops(
            PRODUCTION, tokens=tokens, mean_keys=mean_keys, scored_tokens=0, vocab_size=50257
        )
        return with_keys - stream_flops(
            PRODUCTION, tokens=tokens, mean_keys=0, scored_tokens=0, vocab_size=50257
        )

    # Scores q·k and the weighted sum: 2·E operations each, for each query, key, head and layer.
    pairs = sum(i + 1 for i in range(4096))
    assert attention(4096, (4096 + 1) / 2) == 24 * 16 * pairs * (2 * 64 + 2 * 64)


# BR-68
def test_each_round_includes_its_own_wait_and_not_that_of_the_piece_before() -> None:
    slow = _SlowDevice(0.02)
    timings = interleaved_seconds(
        {"slow": slow.run, "idle": lambda: None},
        device=CPU,
        rounds=2,
        warmup_rounds=1,
        wait=slow.wait,
    )
    assert timings["slow"].fastest_s >= 0.02
    assert timings["idle"].slowest_s < 0.01
