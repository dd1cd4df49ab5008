"""Killable worker processes for everything that may hang, blow up or run away.

    from reward_fns.workers import ERROR, TIMEOUT, register, run_guarded

    register("equal", "my_module:equal")            # a function of JSON values that returns a JSON value
    result = run_guarded("equal", ("x+1", "1+x"), timeout=1.0)
    if result is TIMEOUT or result is ERROR: ...

The caller only writes and reads JSON over pipes. There is no signal handler, no thread and no `multiprocessing`, so
the same call works in the main thread, in other threads, in a coroutine, in a daemonic process (a `DataLoader`
worker) and with any outer alarm. A process that was forked from a caller starts workers of its own: it never shares
pipes with its parent. Workers have a wall-clock, a CPU and a memory limit, cannot write files or start processes, and
end when the program that started them ends, however it ends.

Workers start on first use. How many: `REWARD_FNS_WORKERS`, else half of the processors that fall to this rank, from 1
to 4. Memory of each: `REWARD_FNS_WORKER_MEMORY_MB` (2048).
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._worker import HEADER, MAX_FRAME, WALL_FACTOR

__all__ = ["ERROR", "TIMEOUT", "Failure", "register", "run_guarded", "run_guarded_many", "shutdown", "warm_up"]


class Failure:
    """Why a task has no result. Compare with `is`: `TIMEOUT` or `ERROR`."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        return False

    def __reduce__(self):
        return self.name


TIMEOUT = Failure("TIMEOUT")
ERROR = Failure("ERROR")

STARTUP_SECONDS = 60.0
# The worker's own alarm ends a task on time; only when the whole worker is stuck does the caller have to kill it.
GRACE_SECONDS = 0.5
MAX_TASKS_PER_PROCESS = 5000
RECURSION_LIMIT = 3000

_REGISTRY: dict[str, str] = {}


def register(kind: str, target: str) -> None:
    """Names a worker-side function. `target` is `"package.module:function"`; the module is imported in the worker."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"target must look like 'package.module:function', got {target!r}")
    _REGISTRY[kind] = target


register("symbolic_equal", "reward_fns.symbolic:symbolic_equal")
register("trees_equal", "reward_fns.symbolic:trees_equal")


def worker_count() -> int:
    """Workers that this process starts at most."""
    wanted = os.environ.get("REWARD_FNS_WORKERS")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"REWARD_FNS_WORKERS must be a positive integer, got {wanted!r}")
        return int(wanted)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1
    return max(1, min(4, cpus // (2 * ranks)))


class _Worker:
    """One pair of processes. Used by one thread at a time."""

    def __init__(self):
        if not sys.executable:
            raise RuntimeError("reward_fns needs sys.executable to start its workers, and it is empty")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self.buffer = bytearray()
        self.ready = False
        self.started = time.monotonic()
        self.task_id = 0
        memory_mb = int(os.environ.get("REWARD_FNS_WORKER_MEMORY_MB", "2048"))
        package_root = str(Path(__file__).resolve().parents[1])
        self._send(
            {
                "path": [package_root, *(p or os.getcwd() for p in sys.path)],
                "preload": sorted({target.partition(":")[0] for target in _REGISTRY.values()}),
                "memory": memory_mb << 20,
                "recursion": RECURSION_LIMIT,
                "max_tasks": MAX_TASKS_PER_PROCESS,
            }
        )

    def _send(self, message: dict) -> None:
        body = json.dumps(message).encode()
        view = memoryview(HEADER.pack(len(body)) + body)
        while view:
            view = view[os.write(self.process.stdin.fileno(), view) :]

    def submit(self, target: str, payload: Sequence, timeout: float) -> None:
        self.task_id += 1
        self._send({"id": self.task_id, "target": target, "payload": list(payload), "timeout": timeout})

    def fileno(self) -> int:
        return self.process.stdout.fileno()

    def feed(self) -> list[dict]:
        """Reads what has come and returns the whole messages in it. Raises EOFError when the worker is gone."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError
        self.buffer += data
        messages = []
        while len(self.buffer) >= HEADER.size:
            (size,) = HEADER.unpack(self.buffer[: HEADER.size])
            if size > MAX_FRAME:
                raise EOFError
            if len(self.buffer) < HEADER.size + size:
                break
            messages.append(json.loads(bytes(self.buffer[HEADER.size : HEADER.size + size])))
            del self.buffer[: HEADER.size + size]
        return messages

    def kill(self) -> None:
        # The session id stays valid as long as the process is not reaped, so this cannot hit a stranger.
        if self.process.returncode is None and hasattr(os, "killpg"):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.poll()
        elif self.process.returncode is None:
            self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Closes this process' ends of the pipes."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class _Pool:
    """Hands workers to threads, each to one at a time. The workers of a forked parent are dropped at the fork."""

    def __init__(self):
        self._lock = threading.Condition()
        self._idle: list[_Worker] = []
        self._all: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._count = 0

    def acquire(self, deadline: float, wait: bool = True) -> _Worker | None:
        """Returns a worker, or None when there is none before the deadline (or at once with `wait=False`)."""
        with self._lock:
            while True:
                if self._idle:
                    return self._idle.pop()
                if self._count < worker_count():
                    self._count += 1
                    break
                if not wait:
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or not self._lock.wait(left):
                    return None
        try:
            worker = _Worker()
        except BaseException:
            self.lost()
            raise
        with self._lock:
            self._all.add(worker)
        return worker

    def release(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)
            self._lock.notify()

    def discard(self, worker: _Worker) -> None:
        worker.kill()
        self.lost()

    def lost(self) -> None:
        with self._lock:
            self._count -= 1
            self._lock.notify()

    def shutdown(self) -> None:
        with self._lock:
            workers, self._idle = list(self._all), []
            self._all.clear()
            self._count = 0
            self._lock.notify_all()
        for worker in workers:
            worker.kill()

    def after_fork_in_child(self) -> None:
        for worker in list(self._all):
            worker.forget()
            worker.process.returncode = 0  # not this process' child
        self.__init__()


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.after_fork_in_child)
atexit.register(_POOL.shutdown)


def shutdown() -> None:
    """Ends all workers of this process now. The next call starts new ones."""
    _POOL.shutdown()


def warm_up() -> None:
    """Starts one worker without waiting for it, so that the first hard pair finds sympy imported."""
    worker = _POOL.acquire(0.0, wait=False)
    if worker is not None:
        _POOL.release(worker)


def run_guarded(kind: str, payload: Sequence, timeout: float) -> Any:
    """Runs a registered function in a worker and returns its result, `TIMEOUT` or `ERROR`.

    Args:
        kind: A name given to `register`.
        payload: The function's positional arguments, JSON values (tuples arrive as lists).
        timeout: Seconds of processor time, and 1.5 times as many of wall clock, from when the worker begins.
            Starting a worker or waiting for a free one is not counted.

    Returns:
        What the function returned (as JSON gives it back); `TIMEOUT` when the time was over (or the processor time:
        the worker is killed and replaced); `ERROR` when it raised, ran out of memory or died.
    """
    return run_guarded_many([(kind, payload)], timeout)[0]


def run_guarded_many(tasks: Iterable[tuple[str, Sequence]], timeout: float, budget: float | None = None) -> list[Any]:
    """Runs many tasks on all workers; results in the order of the tasks.

    Args:
        tasks: Pairs `(kind, payload)` as in `run_guarded`.
        timeout: Seconds for each task.
        budget: Seconds for all of them. Tasks that have no result by then get `TIMEOUT`.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    tasks = [(_target(kind), payload) for kind, payload in tasks]
    results: list[Any] = [TIMEOUT] * len(tasks)
    if not tasks:
        return results
    end = time.monotonic() + budget if budget is not None else float("inf")
    todo = deque(range(len(tasks)))
    running: dict[_Worker, tuple[int, float]] = {}
    attempts = [0] * len(tasks)
    try:
        while (todo or running) and time.monotonic() < end:
            while todo:
                # Only the first wait may block: with a worker in hand there are results to read meanwhile.
                worker = _POOL.acquire(min(end, time.monotonic() + STARTUP_SECONDS), wait=not running)
                if worker is None:
                    break
                index = todo.popleft()
                try:
                    worker.submit(*tasks[index], timeout)
                except (BrokenPipeError, OSError):
                    _POOL.discard(worker)
                    _retry(index, attempts, todo, results)
                    continue
                now = time.monotonic()
                running[worker] = (
                    index,
                    now + WALL_FACTOR * timeout + GRACE_SECONDS if worker.ready else now + STARTUP_SECONDS,
                )
            _step(running, tasks, timeout, end, attempts, todo, results)
    finally:
        for worker in list(running):
            _POOL.discard(worker)
    return results


def _target(kind: str) -> str:
    if kind not in _REGISTRY:
        raise KeyError(f"no worker function is registered as {kind!r}; known: {sorted(_REGISTRY)}")
    return _REGISTRY[kind]


def _retry(index: int, attempts: list[int], todo: deque, results: list) -> None:
    """A worker that was found dead before it took the task is no fault of the task: one more try."""
    attempts[index] += 1
    if attempts[index] < 2:
        todo.appendleft(index)
    else:
        results[index] = ERROR


def _step(running: dict, tasks: list, timeout: float, end: float, attempts: list, todo: deque, results: list) -> None:
    """Waits until a running task ends in any way, and books it."""
    if not running:
        return
    now = time.monotonic()
    first = min(min(limit for _, limit in running.values()), end)
    for worker in _readable(list(running), max(0.0, first - now)):
        index, _ = running[worker]
        try:
            messages = worker.feed()
        except (EOFError, OSError):
            del running[worker]
            dead_on_arrival = worker.ready is False
            _POOL.discard(worker)
            if dead_on_arrival:
                _retry(index, attempts, todo, results)
            else:
                results[index] = ERROR
            continue
        for message in messages:
            if "failed" in message:
                del running[worker]
                _POOL.discard(worker)
                raise RuntimeError(
                    f"a grading worker of {sys.executable} cannot start: {message['failed']}. "
                    "Install what is missing, usually: pip install math-verify"
                )
            if "ready" in message:
                worker.ready = True
                running[worker] = (index, time.monotonic() + WALL_FACTOR * timeout + GRACE_SECONDS)
                continue
            if "lost" in message:
                results[index] = TIMEOUT if message["lost"] in _TIME_SIGNALS else ERROR
            elif message.get("id") != worker.task_id:
                continue
            else:
                results[index] = message.get("ok", ERROR)
            running.pop(worker, None)
            _POOL.release(worker)
    now = time.monotonic()
    for worker, (index, limit) in list(running.items()):
        if now >= limit:
            del running[worker]
            _POOL.discard(worker)
            results[index] = TIMEOUT if worker.ready else ERROR


_TIME_SIGNALS = {getattr(signal, name).value for name in ("SIGALRM", "SIGPROF", "SIGXCPU") if hasattr(signal, name)}


def _readable(workers: list[_Worker], timeout: float) -> list[_Worker]:
    if hasattr(select, "poll"):
        poller = select.poll()
        by_fd = {worker.fileno(): worker for worker in workers}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        return [by_fd[fd] for fd, _ in poller.poll(min(timeout, 3600.0) * 1000)]
    return select.select(workers, [], [], min(timeout, 3600.0))[0]
