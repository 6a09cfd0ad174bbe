import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.manifest import Manifest, read_manifest, read_places, read_token_bytes
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.errors import InputError

Pack = Callable[..., tuple[Path, Manifest]]
Scripted = Callable[[int], Any]
EOT = "<|endoftext|>"


def ids_of(folder: Path, manifest: Manifest, split: str) -> list[list[int]]:
    return [
        np.fromfile(folder / shard.file, manifest.id_type).tolist()
        for shard in manifest.splits[split]
    ]


def test_every_document_is_followed_by_one_end_of_text(pack: Pack, scripted: Scripted) -> None:
    # BR-13
    folder, manifest = pack({"train": ["5 6 7", "8 9 1 2"], "val": ["3"]}, scripted(10))
    assert ids_of(folder, manifest, "train") == [[5, 6, 7, 0, 8, 9, 1, 2, 0]]
    places = read_places(folder, "train")
    assert places["first_token"].tolist() == [0, 4]
    assert places["n_tokens"].tolist() == [4, 5]
    assert manifest.splits["train"][0].documents == 2


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "ids"),
    [
        (65_536, "uint16", [65_535, 1]),
        (65_537, "uint32", [65_536, 65_535]),
        (70_001, "uint32", [65_535, 65_536, 70_000]),
    ],
)
def test_largest_ids_come_back_and_the_whole_vocabulary_chooses_the_type(
    pack: Pack, scripted: Scripted, vocab_size: int, dtype: str, ids: list[int]
) -> None:
    # BR-01, BR-02
    text = " ".join(map(str, ids))
    folder, manifest = pack({"train": [text], "val": ["1"]}, scripted(vocab_size))
    assert manifest.dtype == dtype
    assert ids_of(folder, manifest, "train") == [[*ids, 0]]


@pytest.mark.parametrize("wrong", ["10", "65546", "-1"])
def test_id_outside_the_vocabulary_is_refused_by_name(
    pack: Pack, scripted: Scripted, wrong: str
) -> None:
    with pytest.raises(InputError, match=rf"train.jsonl:2: expected ids 0\.\.9, got id {wrong}"):
        pack({"train": ["1", f"2 {wrong}"], "val": ["1"]}, scripted(10))


def test_no_document_crosses_an_edge_and_a_long_one_has_its_own_shard(
    pack: Pack, scripted: Scripted
) -> None:
    texts = ["1 1 1", "2 2 2", "3 3", "4 " * 12, "5", "6"]
    folder, manifest = pack({"train": texts, "val": ["7"]}, scripted(10), shard_tokens=8)
    assert ids_of(folder, manifest, "train") == [
        [1, 1, 1, 0, 2, 2, 2, 0],
        [3, 3, 0],
        [4] * 12 + [0],
        [5, 0, 6, 0],
    ]
    places = read_places(folder, "train")
    assert places["shard"].tolist() == [0, 0, 1, 2, 3, 3]
    for split in SPLITS:
        for shard in manifest.splits[split]:
            assert (folder / shard.file).stat().st_size == shard.tokens * 2


def test_specials_spelled_in_a_text_end_no_document(pack: Pack, tokenizer: Tokenizer) -> None:
    # BR-03
    texts = ["first", f"a {EOT} b <|mask|> <pad>{EOT}", "last"]
    folder, manifest = pack({"train": texts, "val": ["held out"]}, tokenizer)
    ids = np.array(ids_of(folder, manifest, "train")[0])
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    assert len(ends) == 3
    assert [tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1] + 1)] == texts


def test_manifest_says_what_the_tokenizer_says_and_counts_the_documents(
    pack: Pack, tokenizer: Tokenizer, prose: list[str]
) -> None:
    # BR-04
    folder, manifest = pack({"train": prose, "val": ["held out"]}, tokenizer, shard_tokens=200)
    assert (manifest.eot_id, manifest.vocab_size) == (tokenizer.eot_id, tokenizer.vocab_size)
    assert manifest.tokenizer_sha256 == tokenizer.sha256
    shards = ids_of(folder, manifest, "train")
    assert sum(ids.count(tokenizer.eot_id) for ids in shards) == len(prose)
    assert sum(s.text_bytes for s in manifest.splits["train"]) == len("".join(prose).encode())
    sizes = read_token_bytes(folder)
    assert int(sizes[np.concatenate(shards)].sum()) == len("".join(prose).encode())


def test_place_of_each_document_leads_to_its_text(
    pack: Pack, tokenizer: Tokenizer, prose: list[str]
) -> None:
    # BR-05
    folder, manifest = pack({"train": prose, "val": ["held out"]}, tokenizer, shard_tokens=100)
    table = pq.read_table(folder / "documents.parquet").to_pylist()
    assert [row["doc_id"] for row in table] == list(range(len(prose) + 1))
    for row, text in zip(table, [*prose, "held out"], strict=True):
        ids = np.array(ids_of(folder, manifest, row["split"])[row["shard"]])
        first, after = row["first_token"], row["first_token"] + row["n_tokens"]
        assert tokenizer.decode(ids[first : after - 1]) == text
        assert ids[after - 1] == tokenizer.eot_id
        assert row["n_bytes"] == len(text.encode())


def test_threads_do_not_change_a_byte(pack: Pack, tokenizer: Tokenizer, prose: list[str]) -> None:
    # BR-06
    contents = []
    for n_threads in (1, 4):
        folder, _ = pack(
            {"train": prose * 30, "val": prose},
            tokenizer,
            n_threads=n_threads,
            name=f"with-{n_threads}",
        )
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        contents.append([(path.relative_to(folder), path.read_bytes()) for path in files])
    assert contents[0] == contents[1]


def test_packing_again_replaces_what_lay_there(pack: Pack, scripted: Scripted) -> None:
    texts = {"train": ["1 1 1", "2 2 2", "3 3 3"], "val": ["4"]}
    folder, _ = pack(texts, scripted(10), shard_tokens=4)
    assert len(list((folder / "train").iterdir())) == 3
    _, manifest = pack({"train": ["1"], "val": ["4"]}, scripted(10), shard_tokens=4)
    assert [p.name for p in (folder / "train").iterdir()] == ["shard_00000.bin"]
    assert read_manifest(folder) == manifest


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_failed_run_leaves_the_shards_that_were_there(pack: Pack, scripted: Scripted) -> None:
    # BR-10
    folder, manifest = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    before = contents(folder)
    with pytest.raises(InputError, match="got id 11"):
        pack({"train": ["1"], "val": ["11"]}, scripted(10))
    assert contents(folder) == before
    assert read_manifest(folder) == manifest
    assert not [p.name for p in folder.parent.iterdir() if p.name.startswith(".")]


def test_folder_that_holds_something_else_loses_nothing(pack: Pack, scripted: Scripted) -> None:
    folder, _ = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(InputError, match=r"got 'notes\.txt'; move that away"):
        pack({"train": ["1"], "val": ["4"]}, scripted(10))
    assert contents(folder) == before


KILLED = """
import os, signal, sys
from pathlib import Path
import canvaslm.corpus.shards as shards
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.reporting.progress import untracked
where = sys.argv[1]
write, rename = Path.write_bytes, Path.rename
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def write_and_die(path, content):
    write(path, content)
    if where == "in a shard" and path.name == "shard_00001.bin":
        die()
def rename_and_die(path, target):
    rename(path, target)
    if where == "between the renames" and path.name == "shards":
        die()
    if where == "after the renames" and path.suffix == ".partial":
        die()
Path.write_bytes, Path.rename = write_and_die, rename_and_die
params = shards.PackParams(shard_tokens=50, n_threads=1)
shards.pack_shards(Path("documents"), Tokenizer.load(Path("tokenizer.json")), params,
                   Path("shards"), track=untracked)
"""


@pytest.mark.parametrize("where", ["in a shard", "between the renames", "after the renames"])
def test_killed_run_leaves_the_old_shards_or_none_and_a_rerun_gives_the_clean_bytes(
    pack: Pack,
    tokenizer: Tokenizer,
    tokenizer_json: bytes,
    prose: list[str],
    tmp_path: Path,
    write_documents: Callable[..., Path],
    where: str,
) -> None:
    # BR-10
    texts = {"train": prose, "val": ["held out"]}
    _, clean = pack(texts, tokenizer, shard_tokens=50, name="clean")
    _, old = pack({"train": prose[:3], "val": ["held out"]}, tokenizer, name="shards")
    write_documents(tmp_path / "documents", texts)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run(
        [sys.executable, "-c", KILLED, where], cwd=tmp_path, env=environment, check=False
    )
    assert result.returncode == -signal.SIGKILL
    if where == "between the renames":
        with pytest.raises(InputError, match="incomplete dataset"):
            read_manifest(tmp_path / "shards")
    else:
        assert read_manifest(tmp_path / "shards") == (old if where == "in a shard" else clean)
    _, again = pack(texts, tokenizer, shard_tokens=50, name="shards")
    assert again == clean
    assert contents(tmp_path / "shards") == contents(tmp_path / "clean")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_empty_or_missing_split_is_refused(pack: Pack, scripted: Scripted) -> None:
    with pytest.raises(InputError, match="documents in the split, got none"):
        pack({"train": ["1"], "val": []}, scripted(10))
    with pytest.raises(InputError, match="run stages/collect_documents"):
        pack({"train": ["1"]}, scripted(10), name="other")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"])
def test_manifest_that_is_not_whole_is_an_incomplete_dataset(
    pack: Pack, scripted: Scripted, content: bytes
) -> None:
    # BR-10
    folder, _ = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match="incomplete dataset"):
        read_manifest(folder)


def test_size_that_disagrees_with_the_manifest_is_refused(pack: Pack, scripted: Scripted) -> None:
    # BR-01, BR-09
    folder, manifest = pack({"train": ["1 2 3"], "val": ["4"]}, scripted(10))
    shard = folder / manifest.splits["train"][0].file
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(InputError, match=r"shard_00000\.bin: expected 8 bytes, got 6 bytes"):
        read_manifest(folder)
    shard.unlink()
    with pytest.raises(InputError, match="no such file"):
        read_manifest(folder)
    shard.write_bytes(whole)
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | {"dtype": "uint32"}))
    with pytest.raises(InputError, match="expected 16 bytes, got 8"):
        read_manifest(folder)


def test_manifest_of_another_format_is_refused(pack: Pack, scripted: Scripted) -> None:
    folder, _ = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | {"format_version": 2}))
    with pytest.raises(InputError, match="format_version: Input should be 1, got 2"):
        read_manifest(folder)


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.pop(key)


def put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.update({key: value})


SHARD_KEYS = ["file", "tokens", "documents", "text_bytes", "sha256"]
MANIFEST_KEYS = [
    "format_version",
    "dtype",
    "vocab_size",
    "eot_id",
    "tokenizer_sha256",
    "documents_sha256",
    "token_bytes_sha256",
    "splits",
]


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        *(("shard", without(key)) for key in SHARD_KEYS),
        *(("shard", put(key, [3.5])) for key in [*SHARD_KEYS, "more"]),
        ("shard", put("tokens", "7")),
        ("shard", put("tokens", 0)),
        ("shard", put("file", "../../train.bin")),
        *(("whole", without(key)) for key in MANIFEST_KEYS),
        *(("whole", put(key, [3.5])) for key in [*MANIFEST_KEYS, "more"]),
        ("whole", put("dtype", "int8")),
        ("splits", without("val")),
        ("splits", put("test", [])),
        ("splits", put("val", [])),
        ("splits", put("val", [3])),
    ],
)
def test_value_that_does_not_fit_in_the_manifest_is_refused(
    pack: Pack, scripted: Scripted, place: str, damage: Callable[[dict[str, Any]], object]
) -> None:
    folder, _ = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    record = json.loads((folder / "manifest.json").read_text())
    splits = record["splits"]
    damage({"whole": record, "splits": splits, "shard": splits["train"][0]}[place])
    (folder / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="run stages/pack_shards") as told:
        read_manifest(folder)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["documents.parquet", "token_bytes.bin"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "folder"])
def test_damaged_table_beside_the_shards_is_refused(
    pack: Pack, scripted: Scripted, name: str, damage: str
) -> None:
    folder, _ = pack({"train": ["1"], "val": ["4"]}, scripted(10))
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut":
        (folder / name).write_bytes(whole[:-3])
    elif damage == "flipped":
        (folder / name).write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    elif damage == "folder":
        (folder / name).mkdir()
    with pytest.raises(InputError, match=rf"{name}: .* run stages/pack_shards"):
        _ = read_places(folder, "train"), read_token_bytes(folder)
