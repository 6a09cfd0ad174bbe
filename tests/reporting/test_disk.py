"""Does a write that does not fit say by how much?"""

import errno
import os

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting import disk
from canvaslm.reporting.disk import room_for


def say_free(monkeypatch, free_bytes, *, blocks=1000, block=4096):
    """Let the file system state so much."""
    stated = os.statvfs_result((block, block, blocks, free_bytes // block, free_bytes // block, 9,
                                9, 9, 0, 255))  # fmt: skip
    monkeypatch.setattr(disk.os, "statvfs", lambda place: stated)


def test_too_little_room_is_told_in_bytes_before_anything_is_written(tmp_path, monkeypatch):
    """A file takes whole blocks: 2 + 1 of 4096 bytes, and one for the directory."""
    say_free(monkeypatch, 8192)
    with (
        pytest.raises(InputError, match=r"expected 16384 bytes free for it, got 8192 bytes free, 8"
                      r"192 bytes missing"),
        room_for(tmp_path / "absent" / "place", [4097, 1], what="it"),
    ):  # fmt: skip
        pytest.fail("begun")


def test_room_to_the_last_block_is_enough(tmp_path, monkeypatch):
    say_free(monkeypatch, 16384)
    with room_for(tmp_path, [4097, 1], what="it"):
        pass


def test_a_file_system_that_states_nothing_is_tried(tmp_path, monkeypatch):
    say_free(monkeypatch, 0, blocks=0)
    with room_for(tmp_path, [4097, 1], what="it"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_room_that_another_takes_meanwhile_is_counted_again(tmp_path, monkeypatch, number):
    say_free(monkeypatch, 16384)

    def write():
        say_free(monkeypatch, 4096)
        raise OSError(number, os.strerror(number))

    with (
        pytest.raises(InputError, match="got 4096 bytes free, 12288 bytes missing; what stood"),
        room_for(tmp_path, [4097, 1], what="it"),
    ):
        write()


def test_a_quota_is_told_as_one(tmp_path, monkeypatch):
    say_free(monkeypatch, 1 << 20)
    with (
        pytest.raises(InputError, match="0 bytes missing, and yet no room"),
        room_for(tmp_path, [1], what="it"),
    ):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_what_is_no_matter_of_room_stays_what_it_is(tmp_path):
    with pytest.raises(PermissionError), room_for(tmp_path, [1], what="it"):
        raise PermissionError(errno.EACCES, "no")
