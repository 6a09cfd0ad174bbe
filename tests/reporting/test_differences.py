"""Does a table of differences show every key that differs, and no other?"""

from hypothesis import given
from hypothesis import strategies as st

from canvaslm.reporting.differences import as_table, differences, in_one_line

OLD, NEW = "ab12" * 16, "cd34" * 16
STORED = {
    "code": OLD,
    "data": {"eot_id": 0, "shards": {"train/shard_00000.bin": OLD, "train/shard_00001.bin": OLD}},
    "parent": None,
    "pretrain": {"learning_rate": 0.003, "steps": 600},
}
WANTED = {
    "code": OLD,
    "data": {"eot_id": 0, "shards": {"train/shard_00000.bin": OLD, "train/shard_00002.bin": NEW}},
    "parent": {"step": 4},
    "pretrain": {"learning_rate": 0.001, "steps": 600.0},
}


def test_each_key_that_differs_is_told_with_both_values():
    told = [(x.key, x.stored, x.wanted) for x in differences(STORED, WANTED)]
    assert told == [
        ("data.shards.train/shard_00001.bin", f'"{OLD}"', "absent"),
        ("data.shards.train/shard_00002.bin", "absent", f'"{NEW}"'),
        ("parent", "null", "absent"),
        ("parent.step", "absent", "4"),
        ("pretrain.learning_rate", "0.003", "0.001"),
    ]


def test_the_table_has_a_line_for_each_and_its_values_in_full():
    found = differences(STORED, WANTED)
    lines = as_table(found).splitlines()
    assert lines[0].split() == ["key", "stored", "wanted"]
    assert [line.split() for line in lines[1:]] == [[x.key, x.stored, x.wanted] for x in found]
    assert len({line.rindex(x.wanted) for line, x in zip(lines[1:], found, strict=True)}) == 1


def test_one_line_shortens_hashes_and_nothing_else():
    line = in_one_line(differences({"a": OLD, "b": "plain"}, {"a": NEW, "b": "other"}))
    assert line == 'a: ab12ab12ab12.. -> cd34cd34cd34..; b: "plain" -> "other"'


KEYS = st.sampled_from(["a", "b", "ab"])
LEAVES = st.sampled_from([None, True, False, 0, 2, 0.5, "", "text", "2"])
TREES = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES))


@given(TREES, TREES)
def test_nothing_differs_exactly_where_both_are_equal(first, second):
    assert differences(first, first) == []
    assert (differences(first, second) == []) == (first == second)
    there, back = differences(first, second), differences(second, first)
    assert [(x.key, x.stored, x.wanted) for x in there] == [
        (x.key, x.wanted, x.stored) for x in back
    ]
