"""Should this process outlive the DVC that started it?

No: a stage whose DVC has been killed would train on unseen, hold the lock of its run against the
next command, and write outs under the hands of whoever looks at them. A stage that was started by
hand, from a terminal or with nohup, is nobody's child and is left alone.

DVC tells a stage its name in the environment, ``DVC_STAGE``, and nothing of itself. Its process is
the nearest ancestor without that name: between the two may stand the shell of the stage's command
line, which dies later or never. So the kernel's "signal me when my parent dies" would watch the
wrong process; what is watched here is a handle on DVC's process itself, on which the kernel ends a
wait the moment that it dies.
"""

import os
import select
import signal
import threading
from pathlib import Path

_NAME = "DVC_STAGE"
_PROC = Path("/proc")


def end_with_dvc() -> None:
    """See to it that this process is killed as soon as the DVC that started it has died.

    Does nothing outside a stage of DVC, and where the system has no handles on processes.
    """
    name = os.environ.get(_NAME)
    if name is None or not hasattr(os, "pidfd_open") or not (_PROC / "self").exists():
        return
    process = _starter(name)
    if process is None:
        _end("before this stage had begun")
        return
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        _end("before this stage had begun")
        return
    except OSError:  # a kernel or a sandbox without such handles
        return
    if _starter(name) != process:  # it died in between, and its number may be another's now
        os.close(handle)
        _end("before this stage had begun")
        return
    threading.Thread(target=_wait, args=(handle,), name="leash", daemon=True).start()


def _starter(name: str) -> int | None:
    """The process that named this stage: the nearest ancestor that was not itself given the name.

    None when it has died: orphans go to a process that is not of their session.
    """
    process = os.getppid()
    while process and _was_given(process, name):
        process = _parent(process)
    try:
        return process if process and os.getsid(process) == os.getsid(0) else None
    except ProcessLookupError:
        return None


def _was_given(process: int, name: str) -> bool:
    """Whether a process was started with this name of a stage in its environment."""
    try:
        given = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return False
    return f"{_NAME}={name}".encode() in given


def _parent(process: int) -> int:
    """The parent of a process; 0 when there is none."""
    try:
        told = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return 0
    return int(told.rpartition(")")[2].split()[1])  # what stands before is a name with anything


def _wait(handle: int) -> None:
    death = select.poll()
    death.register(handle, select.POLLIN)
    death.poll()
    _end("while this stage ran")


def _end(when: str) -> None:
    """End as if DVC's killer had killed this process too: whatever lies on the disk holds that."""
    try:
        os.write(2, f"the DVC of this stage has died {when}; it ends too\n".encode())
    finally:  # where stderr went to DVC itself, nobody reads it any more
        os.kill(os.getpid(), signal.SIGKILL)
