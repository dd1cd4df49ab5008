"""Killable workers: limits, respawn, threads, forks, daemons, and what is left when the caller is gone."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from reward_fns.workers import ERROR, TIMEOUT, register, run_guarded, run_guarded_many, shutdown

for name in ("add", "spin", "hold_gil", "eat_memory", "die", "write_file", "start_process", "fail", "noisy", "pid"):
    register(f"test_{name}", f"tests.reward_fns.worker_functions:{name}")
REPOSITORY = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True, scope="module")
def importable_functions():
    sys.path.append(REPOSITORY)
    shutdown()
    yield
    sys.path.remove(REPOSITORY)
    shutdown()


def test_returns_what_the_function_returns():
    assert run_guarded("test_add", (2, 3), 5.0) == 5
    assert run_guarded("test_add", ("a", "é−"), 5.0) == "aé−"


def test_results_keep_the_order_of_the_tasks():
    assert run_guarded_many([("test_add", (i, i)) for i in range(50)], 5.0) == [2 * i for i in range(50)]


@pytest.mark.parametrize("name", ["spin", "hold_gil"])
def test_a_hanging_task_is_killed_on_time_and_the_next_one_is_served(name):
    run_guarded("test_add", (1, 1), 5.0)
    start = time.monotonic()
    assert run_guarded(f"test_{name}", (), 0.5) is TIMEOUT
    assert run_guarded("test_add", (1, 1), 5.0) == 2
    assert 0.45 < time.monotonic() - start < 1.5


def test_memory_is_limited():
    assert run_guarded("test_eat_memory", (), 5.0) is ERROR
    assert run_guarded("test_add", (1, 1), 5.0) == 2


@pytest.mark.parametrize("name", ["die", "fail", "start_process"])
def test_a_failing_task_is_an_error_and_not_an_exception(name):
    assert run_guarded(f"test_{name}", (), 5.0) is ERROR
    assert run_guarded("test_add", (1, 1), 5.0) == 2


def test_a_worker_cannot_write_files(tmp_path):
    assert run_guarded("test_write_file", (str(tmp_path / "pwned"),), 5.0) is ERROR
    assert not (tmp_path / "pwned").exists()


def test_printing_does_not_disturb_the_protocol():
    assert run_guarded("test_noisy", (), 5.0) == "done"


def test_unknown_kind_raises():
    with pytest.raises(KeyError, match="no worker function is registered"):
        run_guarded("nothing", (), 1.0)


def test_budget_ends_a_batch():
    start = time.monotonic()
    results = run_guarded_many([("test_add", (1, 1))] + [("test_spin", ())] * 20, 0.4, budget=1.0)
    assert time.monotonic() - start < 2.0
    assert results[0] == 2 and all(result is TIMEOUT for result in results[1:])


def test_threads_share_the_workers():
    results = {}

    def work(i):
        results[i] = [run_guarded("test_add", (i, j), 5.0) for j in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i + j for j in range(20)] for i in range(6)}


def test_coroutine_and_thread_get_the_same_as_the_main_thread():
    async def inside():
        return run_guarded("test_add", (1, 2), 5.0), await asyncio.to_thread(run_guarded, "test_spin", (), 0.3)

    assert asyncio.run(inside()) == (3, TIMEOUT)


def test_an_outer_alarm_survives():
    fired = []
    old = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.6)
    try:
        assert run_guarded("test_spin", (), 0.3) is TIMEOUT
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 0 < left < 0.4
        time.sleep(left + 0.2)
        assert fired == [True]
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def _in_child(queue):
    queue.put((run_guarded("test_add", (20, 22), 5.0), run_guarded("test_pid", (), 5.0)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_child_has_workers_of_its_own(method):
    mine = run_guarded("test_pid", (), 5.0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    value, theirs = queue.get(timeout=60)
    child.join(20)
    assert value == 42 and theirs != mine
    assert run_guarded("test_add", (1, 1), 5.0) == 2


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = [{root!r}]
from reward_fns.workers import register, run_guarded
register("pid", "tests.reward_fns.worker_functions:pid")
register("spin", "tests.reward_fns.worker_functions:spin")
print(*run_guarded("pid", (), 5.0), flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["", "raise ValueError", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "BUSY"],
)
def test_workers_end_with_the_program(then):
    busy = """
import threading
threading.Thread(target=run_guarded, args=("spin", (), 2.0), daemon=True).start()
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code = textwrap.dedent(SCRIPT).format(root=REPOSITORY, then=busy if then == "BUSY" else then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 5
    while time.monotonic() < end and any(_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        os.kill(pid, 0)
        return True
