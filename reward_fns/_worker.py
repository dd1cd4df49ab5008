"""The process that computes for `reward_fns.workers`. Started by file path; never imported by the caller.

Two processes on POSIX. The outer one imports sympy once and then only waits; the inner one, a fork of it, reads
tasks and computes. When a limit kills the inner one, the outer one reports the loss and forks the next, which takes a
few milliseconds instead of the half second that importing sympy takes.

Frames, in both directions: 4 bytes length (big endian), then UTF-8 JSON. JSON and not pickle, so that a worker that
was taken over by the text it computes on cannot run anything in the caller.
"""

import importlib
import json
import math
import os
import struct
import sys

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 26
# Wall-clock limit over processor time limit: a busy machine must not change a verdict at once.
WALL_FACTOR = 1.5

_FORBIDDEN_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "pty.spawn")
_FORBIDDEN_PREFIXES = ("subprocess.", "socket.", "shutil.", "ftplib.", "smtplib.", "urllib.", "webbrowser.")
_CHANGING_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown")


def _read_exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(fd: int):
    """Returns the next message, or None at the end of the stream."""
    header = _read_exactly(fd, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    body = _read_exactly(fd, size)
    return None if body is None else json.loads(body)


def write_frame(fd: int, message) -> None:
    body = json.dumps(message).encode()
    data = HEADER.pack(len(body)) + body
    while data:
        data = data[os.write(fd, data) :]


def _deny(event: str, args: tuple) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        writes = isinstance(mode, str) and any(c in mode for c in "wax+")
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            raise PermissionError("a grading worker may not write files")
    elif event in _FORBIDDEN_EVENTS or event in _CHANGING_EVENTS or event.startswith(_FORBIDDEN_PREFIXES):
        raise PermissionError(f"a grading worker may not call {event}")


def _confine(memory_bytes: int) -> None:
    """Memory limit, no core file, no file growth, death with the outer process, and no way to the system."""
    try:
        import resource
    except ImportError:
        resource = None
    if resource is not None:
        for name, value in (("RLIMIT_AS", memory_bytes), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0)):
            limit = getattr(resource, name, None)
            if limit is None:
                continue
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(limit, (value, hard if name == "RLIMIT_AS" else value))
            except (OSError, ValueError) as error:
                # macOS refuses RLIMIT_AS; the wall-clock and CPU limits hold there.
                if name == "RLIMIT_AS" and sys.platform != "darwin":
                    raise RuntimeError(f"cannot set {name} to {value}") from error
    if sys.platform.startswith("linux"):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    sys.addaudithook(_deny)


def _set_deadline(seconds: float) -> None:
    """Arms (or with 0 disarms) the limits that end this process from outside Python, whatever holds the GIL."""
    import signal

    if not hasattr(signal, "setitimer"):
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
    if seconds:
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _serve(task_fd: int, result_fd: int, max_tasks: int) -> bool:
    """Computes tasks until the stream ends (True) or `max_tasks` are done (False)."""
    functions: dict[str, object] = {}
    for _ in range(max_tasks):
        task = read_frame(task_fd)
        if task is None:
            return True
        _set_deadline(task["timeout"])
        try:
            target = task["target"]
            if target not in functions:
                module, _, name = target.partition(":")
                functions[target] = getattr(importlib.import_module(module), name)
            answer = {"id": task["id"], "ok": functions[target](*task["payload"])}
            json.dumps(answer)
        except RecursionError:
            answer = {"id": task["id"], "error": "RecursionError"}
        except MemoryError:
            answer = {"id": task["id"], "error": "MemoryError"}
        except Exception as error:
            # `str(error)` could print a huge expression: the type is enough to act on.
            answer = {"id": task["id"], "error": type(error).__name__}
        _set_deadline(0)
        write_frame(result_fd, answer)
    return False


def main() -> int:
    task_fd, result_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    hello = read_frame(task_fd)
    if hello is None:
        return 0
    sys.path[:] = hello["path"]
    sys.dont_write_bytecode = True
    sys.setrecursionlimit(hello["recursion"])
    try:
        for module in hello["preload"]:
            importlib.import_module(module)
    except ImportError as error:
        write_frame(result_fd, {"failed": str(error)})
        return 1
    write_frame(result_fd, {"ready": os.getpid()})
    if not hasattr(os, "fork"):
        _confine(hello["memory"])
        while not _serve(task_fd, result_fd, 1 << 30):
            pass
        return 0
    while True:
        pid = os.fork()
        if pid == 0:
            _confine(hello["memory"])
            os._exit(0 if _serve(task_fd, result_fd, hello["max_tasks"]) else 3)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            if code == 0:
                return 0
            if code == 3:
                continue
        write_frame(result_fd, {"lost": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0})


if __name__ == "__main__":
    sys.exit(main())
