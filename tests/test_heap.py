"""Does freed memory stay where the next tensor finds it?"""

import subprocess
import sys

PROGRAM = """
import resource, sys
from canvaslm.heap import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()


def faults_of_a_fresh_buffer():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"1") * 2**24
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults_of_a_fresh_buffer()
print(faults_of_a_fresh_buffer())
"""


def count_faults(how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_buffer_that_was_freed_is_given_out_again_without_a_page_fault() -> None:
    assert count_faults("default") > 1000  # 4,096 pages of 4 KiB
    assert count_faults("keep") < 50


GIBIBYTES = """
import ctypes
from canvaslm.heap import keep_freed_memory

assert keep_freed_memory()
libc = ctypes.CDLL(None)
for name in ("malloc", "sbrk"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
taken = libc.malloc(3 * 2**30)  # no page of it is touched
end = libc.sbrk(0)
libc.free(taken)
print(end - libc.sbrk(0))
"""


def test_more_than_two_gibibytes_at_once_stay_as_well() -> None:
    command = [sys.executable, "-c", GIBIBYTES]
    given_back = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(given_back) == 0
