"""Is the machine named as it is, and is memory counted as a container may take it?"""

from pathlib import Path

import psutil
import pytest
import torch

from canvaslm.device import available_bytes, describe_machine

CPU = torch.device("cpu")
GIB = 2**30


def lay(root: Path, **files: str) -> Path:
    """A file system with these files, a double underscore for each slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB to spare."""
    memory = type("Memory", (), {"available": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", memory)


def test_the_processor_is_named_by_its_model(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Fast 9000 @ 2.0GHz: v2\nprocessor\t: 1\n"
    root = lay(tmp_path, proc__cpuinfo=text)
    assert describe_machine(CPU, root=root)["processor"] == "Fast 9000 @ 2.0GHz: v2"


@pytest.mark.parametrize("text", [None, "", "processor\t: 0\n", "model name\t:\n"])
def test_a_processor_without_a_model_still_has_a_name(tmp_path: Path, text: str | None) -> None:
    root = tmp_path if text is None else lay(tmp_path, proc__cpuinfo=text)
    assert describe_machine(CPU, root=root)["processor"]


def test_without_a_limit_memory_is_the_machine_s(tmp_path: Path) -> None:
    assert available_bytes(CPU, root=tmp_path) == 64 * GIB


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": 8 * GIB, "memory.current": 3 * GIB}, 5 * GIB),
        ({"memory.max": "max", "memory.current": 3 * GIB}, 64 * GIB),
        ({"memory.max": 80 * GIB, "memory.current": GIB}, 64 * GIB),
        ({"memory.max": GIB, "memory.current": 2 * GIB}, 0),
        ({"memory.max": GIB}, 64 * GIB),
        ({"memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": GIB}, 3 * GIB),
        ({"memory/memory.limit_in_bytes": 2**62, "memory/memory.usage_in_bytes": 9}, 64 * GIB),
        ({"a/b/memory.max": 8 * GIB, "a/b/memory.current": GIB}, 7 * GIB),
        ({"a/memory.max": 8 * GIB, "a/memory.current": 6 * GIB,
          "a/b/memory.max": "max", "a/b/memory.current": GIB}, 2 * GIB),
        ({"c/memory.max": GIB, "c/memory.current": 0}, 64 * GIB),
    ],
)  # fmt: skip
def test_memory_is_what_the_tightest_limit_of_the_own_groups_leaves(
    tmp_path: Path, files: dict[str, int | str], left: int
) -> None:
    lay(tmp_path, proc__self__cgroup="0::/a/b\n")
    lay(tmp_path, **{f"{GROUPS}/{name}": f"{value}\n" for name, value in files.items()})
    assert available_bytes(CPU, root=tmp_path) == left


def test_a_group_of_version_1_has_its_own_mount(tmp_path: Path) -> None:
    lay(tmp_path, proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/box\n")
    for name, value in (("limit_in_bytes", 6 * GIB), ("usage_in_bytes", GIB)):
        lay(tmp_path, **{f"{GROUPS}/memory/box/memory.{name}": f"{value}\n"})
    assert available_bytes(CPU, root=tmp_path) == 5 * GIB
