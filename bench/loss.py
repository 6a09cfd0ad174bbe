"""How much slower or leaner is the chunked loss than the dense one?

Forward and backward to hidden states and head, both forms in turn, in multiples of the three matrix
products that neither can avoid. Prints a table on stdout and writes JSON.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from canvaslm.device import describe_machine
from canvaslm.loss import chunked_cross_entropy, dense_cross_entropy
from canvaslm.measure import interleaved_seconds
from canvaslm.reporting.files import write_json

CPU = torch.device("cpu")


def main() -> None:
    """Read the sizes, time the two losses and the bare products, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_257)
    parser.add_argument("--vocab-chunk", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reports/bench/loss.json"))
    options = parser.parse_args()
    runs = _runs(options.tokens, options.width, options.vocab, options.vocab_chunk)
    timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=1)
    print(f"{options.tokens} tokens, width {options.width}, vocabulary {options.vocab}")
    products_s = timings["products"].median_s
    rows = {name: timing.median_s / products_s for name, timing in timings.items()}
    for name, multiple in rows.items():
        print(f"{name:10} {multiple:6.2f} times the three products")
    sizes = {key: getattr(options, key) for key in ("tokens", "width", "vocab", "vocab_chunk")}
    write_json(
        options.out,
        {"machine": describe_machine(CPU), "multiples_of_products": rows, "sizes": sizes},
    )


def _runs(n_tokens: int, width: int, vocab: int, chunk: int) -> dict[str, Callable[[], object]]:
    """The work to compare, on the same random inputs."""
    draws = torch.Generator().manual_seed(1)
    hidden = torch.randn(n_tokens, width, generator=draws, requires_grad=True)
    weight = torch.randn(vocab, width, generator=draws).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab, (n_tokens,), generator=draws)
    slope = torch.randn(n_tokens, vocab, generator=draws)

    def products() -> None:
        with torch.no_grad():
            _ = hidden @ weight.T, slope @ weight, slope.T @ hidden

    def dense() -> None:
        dense_cross_entropy(hidden, weight, targets, reduction="mean").backward()

    def chunked() -> None:
        loss = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=chunk, reduction="mean")
        loss.backward()

    return {"products": products, "dense": dense, "chunked": chunked}


if __name__ == "__main__":
    main()
