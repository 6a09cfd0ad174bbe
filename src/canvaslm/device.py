"""What machine is this, and how is arithmetic done on it?"""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import psutil
import torch

from canvaslm.errors import InputError

Precision = Literal["float32", "bfloat16"]

_ROOT = Path("/")
_LIMITS = (  # of control groups, version 2 and 1: what may be taken, and what is
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def pick_device(name: str) -> torch.device:
    """Resolve ``auto``, ``cpu`` or ``cuda`` to a device of this machine.

    Raises:
        InputError: the name is unknown, or CUDA is asked for and absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "device", expected="a CUDA device", got="none", fix="set device: auto or cpu"
            )
        return torch.device("cuda")
    raise InputError("device", expected="auto, cpu or cuda", got=repr(name), fix="choose one")


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Arithmetic in ``precision`` over float32 weights.

    The weight cache of autocast is off: with it, a pass without gradient that comes first would
    hand its detached copies to the pass that needs gradients, and weights changed in place would
    not be seen.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which norms, angles and sums are computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiplies_in_tiles() -> bool:
    """Whether the CPU has tiles for bfloat16 (AMX), and multiplies it faster than float32."""
    return bool(torch.cpu._is_amx_tile_supported())


def wait_for(device: torch.device) -> None:
    """Return when all work queued on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_bytes(device: torch.device, *, root: Path = _ROOT) -> int:
    """Memory that a new process could still take, in bytes.

    In a container that is what its limit leaves, which the machine as a whole knows nothing of.

    Args:
        device: where the memory would be taken.
        root: the file system that says what a container may take.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_left_by_limits(root)])


def describe_machine(device: torch.device, *, root: Path = _ROOT) -> dict[str, str | int]:
    """Name the machine behind a measurement: processor, cores, threads, versions.

    Args:
        device: where it was measured.
        root: the file system that says which processor this is.
    """
    name = _processor(root / "proc" / "cpuinfo")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": device.type,
        "processor": name,
        "cores": psutil.cpu_count(logical=True) or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor(cpuinfo: Path) -> str:
    """The model as Linux names it, or whatever else is known of it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    models = (value.strip() for key, _, value in pairs if key.strip() == "model name")
    return next(filter(None, models), "") or platform.processor() or platform.machine()


def _left_by_limits(root: Path) -> list[int]:
    """What each limit on this process's control groups leaves, in bytes; none without a limit."""
    left = []
    for folder in _control_groups(root):
        for limit, used in _LIMITS:
            try:
                numbers = [int((folder / name).read_text()) for name in (limit, used)]
            except (OSError, ValueError):  # no such limit here, or `max`: none at all
                continue
            left.append(max(0, numbers[0] - numbers[1]))
    return left


def _control_groups(root: Path) -> list[Path]:
    """The folders of the groups that this process is in, and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    mounts = root / "sys" / "fs" / "cgroup"
    folders = [mounts, mounts / "memory"]
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = mounts / "memory" if controllers else mounts
        inner = mount / place.lstrip("/")
        folders += [inner, *(outer for outer in inner.parents if outer.is_relative_to(mount))]
    return list(dict.fromkeys(folders))
