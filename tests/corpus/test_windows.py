import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvaslm.corpus.fetch import hash_file
from canvaslm.corpus.manifest import Manifest
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.corpus.windows import Windows
from canvaslm.errors import InputError

Pack = Callable[..., tuple[Path, Manifest]]
Scripted = Callable[[int], Any]


def numbers(first: int, count: int) -> str:
    return " ".join(str(n) for n in range(first, first + count))


def test_windows_follow_each_other_within_a_shard_and_the_rest_is_tail(
    pack: Pack, scripted: Scripted
) -> None:
    # BR-12: tokens 0..20, four windows of five and a tail of one
    folder, _ = pack({"train": [numbers(1, 20)], "val": [numbers(1, 9)]}, scripted(50))
    windows = Windows(folder, "train", 5)
    assert (len(windows), windows.tail_tokens) == (4, 1)
    assert windows.gather(np.arange(4)).tolist() == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12, 13, 14, 15],
        [16, 17, 18, 19, 20],
    ]


def test_no_window_crosses_a_shard(pack: Pack, scripted: Scripted) -> None:
    texts = {"train": [numbers(1, 6), numbers(11, 9), numbers(31, 2)], "val": ["1 2 3 4"]}
    folder, _ = pack(texts, scripted(50), shard_tokens=8)
    windows = Windows(folder, "train", 4)
    assert windows.gather(np.array([1, 2, 0])).tolist() == [
        [11, 12, 13, 14],
        [15, 16, 17, 18],
        [1, 2, 3, 4],
    ]
    assert (len(windows), windows.tail_tokens) == (3, 3 + 2 + 3)
    assert [windows.place_of(i) for i in range(3)] == [(0, 0), (1, 0), (1, 4)]


@pytest.mark.parametrize(("tokens", "n_windows", "tail"), [(8, 1, 0), (9, 1, 1), (15, 1, 7)])
def test_split_of_a_window_or_a_little_more_has_one_window(
    pack: Pack, scripted: Scripted, tokens: int, n_windows: int, tail: int
) -> None:
    # BR-11
    folder, _ = pack({"train": [numbers(1, 20)], "val": [numbers(1, tokens - 1)]}, scripted(50))
    windows = Windows(folder, "val", 8)
    assert (len(windows), windows.tail_tokens) == (n_windows, tail)


def test_split_shorter_than_a_window_is_refused_with_both_numbers(
    pack: Pack, scripted: Scripted
) -> None:
    # BR-11
    folder, _ = pack({"train": [numbers(1, 20)], "val": [numbers(1, 6)]}, scripted(50))
    with pytest.raises(InputError, match="window of 8 tokens in a shard, got 7 tokens in 1"):
        Windows(folder, "val", 8)


def test_ends_of_text_stand_inside_windows_as_ids(pack: Pack, scripted: Scripted) -> None:
    # BR-13
    folder, _ = pack({"train": ["5 6 7", "8 9 1 2", "3 4"], "val": [numbers(1, 9)]}, scripted(50))
    windows = Windows(folder, "train", 4)
    read = windows.gather(np.arange(3))
    assert read[0].tolist() == [5, 6, 7, 0]
    assert int((read == 0).sum()) == 3


def test_each_token_belongs_to_the_document_it_was_packed_from(
    pack: Pack, tokenizer: Tokenizer, prose: list[str]
) -> None:
    folder, _ = pack({"train": prose, "val": ["held out"] * 9}, tokenizer, shard_tokens=90)
    windows = Windows(folder, "train", 8)
    expected: list[int] = []
    for number, text in enumerate(prose):
        expected += [number] * (len(tokenizer.encode(text)) + 1)
    start = 0
    for number, shard in enumerate(windows.manifest.splits["train"]):
        for index in range(len(windows)):
            shard_of, first = windows.place_of(index)
            if shard_of == number:
                there = expected[start + first : start + first + 8]
                assert windows.documents_of(index).tolist() == there
        start += shard.tokens
    assert start == len(expected)


def test_bytes_of_a_window_are_those_of_its_text_without_the_ends(
    pack: Pack, tokenizer: Tokenizer, prose: list[str]
) -> None:
    folder, _ = pack({"train": prose, "val": ["held out"] * 9}, tokenizer, shard_tokens=90)
    windows = Windows(folder, "train", 8)
    for index in range(len(windows)):
        ids = windows.gather(np.array([index]))[0]
        plain = tokenizer.decode_bytes(ids[ids != tokenizer.eot_id])
        sizes = windows.text_bytes_of(index)
        assert sizes.shape == (8,)
        assert int(sizes.sum()) == len(plain)


@pytest.mark.parametrize("index", [-1, 4])
def test_window_that_is_not_there_is_an_error(pack: Pack, scripted: Scripted, index: int) -> None:
    folder, _ = pack({"train": [numbers(1, 20)], "val": [numbers(1, 9)]}, scripted(50))
    with pytest.raises(IndexError):
        Windows(folder, "train", 5).gather(np.array([index]))


def test_shards_cannot_be_written_through_windows(pack: Pack, scripted: Scripted) -> None:
    folder, manifest = pack({"train": [numbers(1, 20)], "val": [numbers(1, 9)]}, scripted(50))
    before = (folder / manifest.splits["train"][0].file).read_bytes()
    Windows(folder, "train", 5).gather(np.arange(4))[:] = 7
    assert (folder / manifest.splits["train"][0].file).read_bytes() == before


def test_shard_of_fifty_million_tokens_holds_12207_windows_and_a_tail_of_128(
    pack: Pack, scripted: Scripted
) -> None:
    folder, manifest = pack({"train": [numbers(1, 20)], "val": [numbers(1, 9)]}, scripted(50))
    shard = folder / manifest.splits["train"][0].file
    os.truncate(shard, 2 * 50_000_000)  # a hole on the disk
    record = json.loads((folder / "manifest.json").read_text())
    record["splits"]["train"][0] |= {"tokens": 50_000_000, "sha256": hash_file(shard)}
    (folder / "manifest.json").write_text(json.dumps(record))
    windows = Windows(folder, "train", 4096)
    assert (len(windows), windows.tail_tokens) == (12_207, 128)
    assert windows.place_of(12_206) == (0, 12_206 * 4096)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_with_one_flipped_bit_is_refused_on_opening(
    pack: Pack, scripted: Scripted, split: str
) -> None:
    folder, manifest = pack({"train": [numbers(1, 20)], "val": [numbers(1, 9)]}, scripted(50))
    shard = manifest.splits[split][-1]
    content = bytearray((folder / shard.file).read_bytes())
    content[3] ^= 1
    (folder / shard.file).write_bytes(content)
    with pytest.raises(InputError, match=rf"{shard.file}: expected sha256 {shard.sha256}.*, got "):
        Windows(folder, split, 5)
    Windows(folder, "val" if split == "train" else "train", 5)
