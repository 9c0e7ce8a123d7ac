"""The parent process of an embedded server, which outlives the server's owner just long enough to stop it.

Started as a script (`python -S -E guard.py`), it imports almost nothing and needs a few megabytes. It starts the
server, reports its process id on standard output, and stops it when standard input closes or when its own parent
changes, which covers every way in which the owner can end, SIGKILL included. Being the server's parent, it can never
signal a process id that was taken over by somebody else. Should the guard itself be killed, Linux signals the server
(`PR_SET_PDEATHSIG` belongs to the thread that forked; the guard has only one).

Arguments: the owner's process id, the grace period in seconds, the directory to remove afterwards (empty: none),
the descriptor that the server keeps open (its lock), then the server's command line.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_PARENT_CHECK_S = 0.5
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the server until it or its owner ends; return the server's exit status, or 128 + signal."""
    owner, grace_s, directory = int(arguments[0]), float(arguments[1]), arguments[2]
    lock, command = int(arguments[3]), arguments[4:]
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    stop_requested: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    server = _start(command, lock)
    os.write(1, f"{server}\n".encode())
    os.close(1)

    deadline = None
    killed = False
    while True:
        done, status = os.waitpid(server, os.WNOHANG)
        if done:
            break
        now = time.monotonic()
        if deadline is None and (stop_requested or os.getppid() != owner):
            os.kill(server, signal.SIGTERM)
            deadline = now + grace_s
        if deadline is not None and now >= deadline and not killed:
            os.kill(server, signal.SIGKILL)
            killed = True
        watched = [wake_read] if deadline is not None else [wake_read, 0]
        readable, _, _ = select.select(watched, [], [], _PARENT_CHECK_S)
        if wake_read in readable:
            os.read(wake_read, 512)
        if 0 in readable and not os.read(0, 512):
            stop_requested.append(1)

    _kill_group(server)
    if directory:
        _remove(directory)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _start(command: list[str], lock: int) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent(guard)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.set_inheritable(lock, True)
        os.execv(command[0], command)  # noqa: S606 - the command comes from the owner's own code
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _die_with_parent(guard: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != guard:  # it died before the call above
        os._exit(127)


def _kill_group(server: int) -> None:
    # A killed server leaves the child that rewrites its append-only file.
    try:
        os.killpg(server, signal.SIGKILL)
    except OSError:
        return


def _remove(directory: str) -> None:
    try:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
