"""The kernels' threads: each chunk runs once and before the call returns, whoever is in the way."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kernels.pool
from kernels.pool import INT, POINTER, Pool

MOST = 13  # chunks of a job

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads in /proc"
)


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("pool") / "pool.so"
    folder = Path(kernels.pool.__file__).parent
    sources = [str(folder / "pool.c"), str(Path(__file__).parent / "pool_jobs.c")]
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, f"-I{folder}", "-o", str(target), *sources], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.count_wrong.argtypes, loaded.count_wrong.restype = [POINTER, INT, INT, INT, POINTER], INT
    loaded.count_nested.argtypes, loaded.count_nested.restype = [POINTER, INT, POINTER], None
    return loaded


def count_wrong(functions: ctypes.CDLL, pool: Pool, jobs: int, work: int = 0) -> int:
    counts = (INT * MOST)()
    return int(functions.count_wrong(pool.pointer, jobs, MOST, work, counts))


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.parametrize("threads", (1, 2, 3, 16))
def test_each_chunk_runs_once(functions: ctypes.CDLL, threads: int) -> None:
    before = count_threads()
    pool = Pool(functions, threads)
    assert pool.threads == threads and count_threads() == before + threads - 1
    for work in (0, 300):
        assert count_wrong(functions, pool, 2000, work) == 0
    pool.close()
    assert count_threads() == before


def test_each_chunk_runs_once_between_busy_processes(functions: ctypes.CDLL) -> None:
    pool = Pool(functions, 4)
    with busy_cores(3):
        assert count_wrong(functions, pool, 1000, 1000) == 0
    pool.close()


def test_sleeping_workers_wake_up(functions: ctypes.CDLL) -> None:
    """Between the jobs every worker has time to fall asleep, or is just about to."""
    pool = Pool(functions, 3)
    pause = threading.Event()
    for round_ in range(100):
        pause.wait(0.0019 + 0.00002 * (round_ % 20))
        assert count_wrong(functions, pool, MOST + 1, 200) == 0
    pool.close()


def test_an_idle_pool_uses_no_time(functions: ctypes.CDLL) -> None:
    pool = Pool(functions, 3)
    assert count_wrong(functions, pool, 10) == 0
    states: list[str] = []
    for _ in range(1000):
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
        if states.count("R") <= 1:  # the reader itself
            break
        threading.Event().wait(0.01)
    assert states.count("R") <= 1
    pool.close()


def test_a_call_from_inside_is_done_by_its_caller(functions: ctypes.CDLL) -> None:
    pool = Pool(functions, 3)
    counts = (INT * (9 * 9))()
    functions.count_nested(pool.pointer, 9, counts)
    assert list(counts) == [1] * 81
    assert count_wrong(functions, pool, 100) == 0
    pool.close()


def test_calls_of_several_threads_do_not_disturb_each_other(functions: ctypes.CDLL) -> None:
    pool = Pool(functions, 3)
    wrong: list[int] = []

    def call() -> None:
        wrong.append(count_wrong(functions, pool, 2000, 50))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [0, 0, 0]
    pool.close()


def test_a_closed_pool_still_computes(functions: ctypes.CDLL) -> None:
    pool = Pool(functions, 3)
    pool.close()
    pool.close()
    assert pool.threads == 1 and count_wrong(functions, pool, 100) == 0


def test_a_forgotten_pool_leaves_no_thread(functions: ctypes.CDLL) -> None:
    before = count_threads()
    for _ in range(20):
        Pool(functions, 3)
    gc.collect()
    assert count_threads() == before


def test_a_forked_child_computes_and_closes(functions: ctypes.CDLL) -> None:
    """In a process of its own: forking this one, which has threads, would be asking for trouble."""
    program = (
        "import ctypes, os, sys\n"
        "from kernels.pool import Pool\n"
        "functions = ctypes.CDLL(sys.argv[1])\n"
        "functions.count_wrong.argtypes = [ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]\n"
        "pool, counts = Pool(functions, 3), (ctypes.c_int64 * 13)()\n"
        "check = lambda: functions.count_wrong(pool.pointer, 500, 13, 50, counts)\n"
        "assert check() == 0\n"
        "child = os.fork()\n"
        "wrong = check()\n"
        "pool.close()\n"
        "del pool\n"
        "if child == 0:\n"
        "    os._exit(min(wrong, 1))\n"
        "assert os.waitpid(child, 0)[1] == 0 and wrong == 0\n"
    )
    subprocess.run([sys.executable, "-c", program, functions._name], check=True, timeout=60)


def test_no_threads_are_refused(functions: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="threads"):
        Pool(functions, 0)
