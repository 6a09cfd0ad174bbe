from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from canvaslm.diffusion import corruption
from canvaslm.diffusion.corruption import (
    Noisy,
    corrupt_at,
    draw_continuous_pass,
    draw_corruption,
    draw_sweep_pass,
)
from canvaslm.diffusion.schedule import Context, clean_share
from canvaslm.layout import Layout
from canvaslm.randomness import stream
from oracles import kept_share, tilted_time
from shapes import tiny_diffusion

N_TIMES = 16
DIFFUSION = tiny_diffusion(train_times=N_TIMES)


def clean_windows(layout: Layout, n_windows: int) -> Tensor:
    shape = (n_windows, layout.window_tokens)
    return torch.randint(layout.vocab_size, shape, generator=torch.Generator().manual_seed(3))


def draw(
    layout: Layout, n_windows: int, *, context: Context = "clean", seed: int = 5
) -> tuple[Tensor, Noisy]:
    clean = clean_windows(layout, n_windows)
    noisy = draw_corruption(
        clean,
        np.arange(n_windows),
        layout=layout,
        diffusion=DIFFUSION,
        context=context,
        seed=seed,
        tilt=0.0,
    )
    return clean, noisy


def test_a_windows_noise_does_not_depend_on_its_batch(tiny_layout: Layout) -> None:
    """BR-46: nor on the order, so neither on a resume nor on how many workers read windows."""
    clean, whole = draw(tiny_layout, 12)
    order = np.random.default_rng(0).permutation(12)
    for part in np.array_split(order, 5):
        alone = draw_corruption(
            clean[part],
            part,
            layout=tiny_layout,
            diffusion=DIFFUSION,
            context="clean",
            seed=5,
            tilt=0.0,
        )
        assert torch.equal(alone.ids, whole.ids[part])
        assert torch.equal(alone.times, whole.times[part])


class NoTorchDraws(TorchDispatchMode):
    """Refuse every operation of torch that draws from a generator, on whatever device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func} draws"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("draw_random", [torch.rand, torch.randn, torch.randperm])
def test_a_draw_by_torch_is_noticed(device: str, draw_random: Callable[..., Tensor]) -> None:
    """What the next test leans on."""
    with pytest.raises(AssertionError, match="draws"), NoTorchDraws():
        draw_random(4, device=device)
    with pytest.raises(AssertionError, match="draws"), NoTorchDraws():
        torch.zeros(4, device=device).bernoulli_(0.5)


@pytest.mark.parametrize("context", ["clean", "prefix"])
def test_all_draws_are_numpys_on_the_cpu_whatever_the_device(
    tiny_layout: Layout, monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    """BR-46: times, corrupted positions and replacement ids are the same on CPU and accelerator.

    `meta` stands for the accelerator: nothing can be computed there, so all that is drawn must
    come from the CPU and only then be moved.
    """
    applied: list[list[np.ndarray]] = []
    opened: list[tuple[object, ...]] = []

    def spied_corrupt(clean: Tensor, *draws: np.ndarray, n_times: int, tilt: float) -> Tensor:
        applied[-1] += [draw.copy() for draw in draws]
        return corrupt_at(clean, *draws, n_times=n_times, tilt=tilt)

    def spied_stream(*key: object) -> np.random.Generator:
        opened.append(key)
        return stream(*key)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(corruption, "corrupt_at", spied_corrupt)
    monkeypatch.setattr(corruption, "stream", spied_stream)
    numbers = np.array([7, 2, 40])
    for device in ("cpu", "meta"):
        clean = clean_windows(tiny_layout, 3).to(device)
        applied.append([])
        with NoTorchDraws():
            noisy = draw_corruption(
                clean,
                numbers,
                layout=tiny_layout,
                diffusion=DIFFUSION,
                context=context,
                seed=5,
                tilt=0.0,
            )
            draw_sweep_pass(
                clean, numbers, pass_number=3, layout=tiny_layout, n_times=N_TIMES, seed=5, tilt=0.0
            )
        assert noisy.ids.device.type == noisy.times.device.type == device
    cpu, other = applied
    assert len(cpu) == 6  # times, uniforms and replacements, of training and of a sweep
    assert all(np.array_equal(one, two) for one, two in zip(cpu, other, strict=True))
    keys = [(5, name, n) for name in ("corruption", "bound/3") for n in numbers]
    assert opened == keys * 2


def test_other_seeds_and_windows_draw_other_noise(tiny_layout: Layout) -> None:
    _, first = draw(tiny_layout, 6)
    _, other = draw(tiny_layout, 6, seed=6)
    assert not torch.equal(first.times, other.times)
    assert len({tuple(row) for row in first.times.tolist()}) == 6


def test_every_canvas_has_one_time_uniform_on_one_to_n(tiny_layout: Layout) -> None:
    _, noisy = draw(tiny_layout, 4000)
    counts = torch.bincount(noisy.times.flatten(), minlength=N_TIMES + 1)
    assert counts[0] == 0
    expected = noisy.times.numel() / N_TIMES  # 1000
    assert len(counts) == N_TIMES + 1
    assert (counts[1:] - expected).abs().max() < 5 * expected**0.5
    assert bool(noisy.carries_loss.all())


def test_tokens_are_kept_with_the_clean_share_or_drawn_uniformly(tiny_layout: Layout) -> None:
    clean, noisy = draw(tiny_layout, 4000)
    times = noisy.times.repeat_interleave(tiny_layout.canvas_tokens, 1)
    for t in range(1, N_TIMES + 1):
        here = times == t
        share = clean_share(t, N_TIMES)
        probability = share + (1 - share) / tiny_layout.vocab_size
        spread = (probability * (1 - probability) / int(here.sum())) ** 0.5
        assert abs((noisy.ids == clean)[here].float().mean() - probability) < 5 * spread


@pytest.mark.parametrize("tilt", [1.0, 4.0])
def test_under_a_tilt_tokens_are_kept_with_the_share_of_their_own_time(
    tiny_layout: Layout, tilt: float
) -> None:
    clean = clean_windows(tiny_layout, 4000)
    noisy = draw_corruption(
        clean,
        np.arange(4000),
        layout=tiny_layout,
        diffusion=DIFFUSION,
        context="clean",
        tilt=tilt,
        seed=1,
    )
    L, ends = tiny_layout.canvas_tokens, 0
    is_kept = (noisy.ids == clean).unflatten(1, (-1, L))
    for t in range(1, N_TIMES + 1):
        here = noisy.times == t
        for i in range(L):
            at = tilted_time(t, i, canvas_tokens=L, n_times=N_TIMES, tilt=tilt)
            share = kept_share(at, N_TIMES)
            probability = share + (1 - share) / tiny_layout.vocab_size
            spread = (probability * (1 - probability) / int(here.sum())) ** 0.5
            assert abs(is_kept[here][:, i].float().mean() - probability) <= 5 * spread + 1e-12
            ends += at in (0, N_TIMES)
    assert ends > N_TIMES  # more than the last position of each time


def test_a_million_draws_reach_every_real_token_and_no_padded_one() -> None:
    layout = Layout(canvas_tokens=500, canvases_per_window=2, vocab_size=1000)
    drawn = torch.zeros(1000, dtype=torch.int64)
    clean = torch.zeros(1000, layout.window_tokens, dtype=torch.int64)
    noisy = draw_sweep_pass(
        clean, np.arange(1000), pass_number=0, layout=layout, n_times=1, seed=1, tilt=0.0
    )  # N = 1: nothing is kept
    drawn = torch.bincount(noisy.ids.flatten(), minlength=1000)
    assert len(drawn) == 1000
    assert (drawn - 1000).abs().max() < 6 * 1000**0.5  # the end of text, 999 or any, as the rest


@pytest.mark.parametrize("context", ["clean", "noisy"])
def test_without_a_prefix_every_canvas_is_noisy(tiny_layout: Layout, context: Context) -> None:
    _, noisy = draw(tiny_layout, 100, context=context)
    assert int(noisy.times.min()) == 1


def test_prefix_leaves_zero_to_all_but_one_leading_canvases_clean(tiny_layout: Layout) -> None:
    clean, noisy = draw(tiny_layout, 2000, context="prefix")
    loss = noisy.carries_loss
    n_clean = (~loss).sum(1)
    assert torch.equal(loss, torch.arange(4) >= n_clean[:, None])  # leading, nothing else
    counts = torch.bincount(n_clean, minlength=4)
    assert len(counts) == 4
    assert (counts - 500).abs().max() < 5 * 500**0.5
    untouched = (~loss).repeat_interleave(tiny_layout.canvas_tokens, 1)
    assert torch.equal(noisy.ids[untouched], clean[untouched])
    _, whole = draw(tiny_layout, 2000)
    assert torch.equal(noisy.times[loss], whole.times[loss])


def test_sweep_takes_every_canvas_through_every_time_once(tiny_layout: Layout) -> None:
    clean = clean_windows(tiny_layout, 3)
    times = [
        draw_sweep_pass(
            clean,
            np.arange(3),
            pass_number=m,
            layout=tiny_layout,
            n_times=N_TIMES,
            seed=1,
            tilt=0.0,
        ).times
        for m in range(N_TIMES)
    ]
    assert torch.equal(times[2][0], torch.tensor([3, 4, 5, 6]))
    visited = torch.stack(times).sort(0).values  # (N, B, C)
    assert torch.equal(visited, torch.arange(1, N_TIMES + 1)[:, None, None].expand_as(visited))


def test_sweep_draws_anew_for_each_pass_and_window(tiny_layout: Layout) -> None:
    clean = torch.zeros(1, tiny_layout.window_tokens, dtype=torch.int64)

    def noise(window: int, pass_number: int) -> Tensor:
        return draw_sweep_pass(
            clean,
            np.array([window]),
            pass_number=pass_number,
            layout=tiny_layout,
            n_times=1,  # nothing is kept, whatever the pass
            seed=1,
            tilt=0.0,
        ).ids

    assert torch.equal(noise(4, 0), noise(4, 0))
    assert not torch.equal(noise(4, 0), noise(9, 0))
    assert not torch.equal(noise(4, 0), noise(4, 1))


def test_continuous_passes_take_every_canvas_through_every_part_of_time_once(
    tiny_layout: Layout,
) -> None:
    clean = clean_windows(tiny_layout, 50)
    times = torch.stack(
        [
            draw_continuous_pass(
                clean,
                np.arange(50),
                pass_number=m,
                n_passes=6,
                layout=tiny_layout,
                seed=1,
                tilt=0.0,
            ).times
            for m in range(6)
        ]
    )  # (K, B, C)
    parts = (6 * times).ceil().long()
    canvases = torch.arange(tiny_layout.canvases_per_window)
    for m in range(6):
        assert bool((parts[m] == 1 + (canvases + m) % 6).all())
    place = (6 * times + 1 - parts).flatten()  # in its part: uniform on (0, 1]
    assert float(place.min()) > 0
    assert abs(float(place.mean()) - 0.5) < 4 * (1 / 12 / place.numel()) ** 0.5
    assert len(torch.unique(place)) == place.numel()


def test_tokens_of_a_continuous_pass_are_kept_with_the_share_of_their_own_time(
    tiny_layout: Layout,
) -> None:
    clean = clean_windows(tiny_layout, 3000)
    noisy = draw_continuous_pass(
        clean, np.arange(3000), pass_number=1, n_passes=3, layout=tiny_layout, seed=1, tilt=0.0
    )
    share = clean_share(noisy.times, 1).repeat_interleave(tiny_layout.canvas_tokens, 1)
    odds = share + (1 - share) / tiny_layout.vocab_size
    kept = (noisy.ids == clean).double()
    for times in (noisy.times < 0.5, noisy.times >= 0.5):
        here = times.repeat_interleave(tiny_layout.canvas_tokens, 1)
        spread = float((odds * (1 - odds))[here].sum()) ** 0.5
        assert abs(float((kept - odds)[here].sum())) < 4 * spread


def test_noise_of_a_continuous_pass_does_not_depend_on_the_batch(tiny_layout: Layout) -> None:
    clean, numbers = clean_windows(tiny_layout, 5), np.array([9, 2, 7, 4, 0])

    def draw_rows(rows: slice) -> tuple[Tensor, Tensor]:
        noisy = draw_continuous_pass(
            clean[rows],
            numbers[rows],
            pass_number=2,
            n_passes=4,
            layout=tiny_layout,
            seed=1,
            tilt=0.0,
        )
        return noisy.ids, noisy.times

    parts = [draw_rows(slice(i, i + 2)) for i in (0, 2, 4)]
    for whole, part in zip(draw_rows(slice(None)), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(part))


def test_corrupt_at_keeps_below_the_share_and_replaces_at_and_above_it() -> None:
    clean = torch.tensor([[1, 2, 3, 4]])
    share = clean_share(1, 2)
    uniforms = np.array([[np.nextafter(share, 0), share, 0.0, 0.0]])
    noisy = corrupt_at(
        clean, np.array([[1, 2]]), uniforms, np.array([[7, 7, 7, 7]]), n_times=2, tilt=0.0
    )
    assert noisy.tolist() == [[1, 7, 7, 7]]
    kept = corrupt_at(
        clean,
        np.array([[0, 0]]),
        np.full((1, 4), np.nextafter(1, 0)),
        np.array([[7] * 4]),
        n_times=2,
        tilt=0.0,
    )
    assert torch.equal(kept, clean)


@pytest.mark.parametrize("n_times", [16, None])
@pytest.mark.parametrize("time_draw", ["uniform", "middle", "spread"])
def test_times_have_the_law_of_their_draw_and_belong_to_the_window(
    tiny_layout: Layout, time_draw: str, n_times: int | None
) -> None:
    diffusion = tiny_diffusion(time_draw=time_draw, train_times=n_times)
    numbers = np.arange(4000)
    clean = clean_windows(tiny_layout, len(numbers))

    def times_of(some: np.ndarray, seed: int = 5) -> np.ndarray:
        noisy = draw_corruption(
            clean[some],
            some,
            layout=tiny_layout,
            diffusion=diffusion,
            context="clean",
            seed=seed,
            tilt=0.0,
        )
        return noisy.times.numpy()

    times = times_of(numbers)
    order = np.array([7, 3999, 0])
    assert np.array_equal(times_of(order), times[order])
    assert not np.array_equal(times_of(order, seed=6), times[order])
    shares = times / diffusion.n_times
    assert shares.min() > 0
    assert shares.max() <= 1
    top = np.arange(1, 17) / 16
    found = np.array([(shares <= edge).mean() for edge in top])
    due = np.where(top < 0.5, 2 * top**2, 1 - 2 * (1 - top) ** 2) if time_draw == "middle" else top
    # Sixteen thousand draws: five standard errors of a share, and far less where they are spread.
    allowed = 0.001 if time_draw == "spread" else 5 * 0.5 / 16000**0.5
    assert np.abs(found - due).max() < allowed
    if n_times is None:
        assert len(np.unique(times)) == times.size


def test_spread_times_are_as_even_in_every_canvas_and_in_every_step(tiny_layout: Layout) -> None:
    diffusion = tiny_diffusion(time_draw="spread", train_times=None)
    numbers = np.arange(256)
    noisy = draw_corruption(
        clean_windows(tiny_layout, 256),
        numbers,
        layout=tiny_layout,
        diffusion=diffusion,
        context="clean",
        seed=5,
        tilt=0.0,
    )
    times = noisy.times.numpy()
    for part in (times[:16].ravel(), times[160:176].ravel(), times[:, 0], times[:, -1]):
        gaps = np.diff(np.sort(part), append=np.sort(part)[0] + 1)
        assert gaps.max() < 4 / len(part)
