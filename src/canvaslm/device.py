"""What machine is this, and how is arithmetic done on it?"""

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import psutil
import torch

from canvaslm.errors import InputError

Precision = Literal["float32", "bfloat16"]


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


def wait_for(device: torch.device) -> None:
    """Return when all work queued on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_bytes(device: torch.device) -> int:
    """Memory that a new process could still take, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Name the machine behind a measurement: processor, cores, threads, versions."""
    name = platform.processor() or platform.machine()
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
