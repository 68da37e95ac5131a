"""One thread a process, and the number before afterwards."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from leakgauge.harness.core.threads import linear_algebra, one_thread


def threads():
    return {torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info())}


def fail():
    raise ValueError(threads())


def test_all_libraries_have_one_thread_inside_and_as_many_as_before_after_it():
    with threadpool_limits(2):
        torch.set_num_threads(2)
        before = threads()
        with pytest.raises(ValueError, match=r"^\{1\}$"):
            one_thread()(fail)()
        assert threads() == before
    torch.set_num_threads(1)


def test_libraries_are_searched_again_only_once_another_module_is_imported(monkeypatch):
    found = [linear_algebra(), linear_algebra()][1]  # the first call may import the search itself
    assert linear_algebra() is found
    monkeypatch.setitem(sys.modules, "brings_a_library", ModuleType("brings_a_library"))
    assert linear_algebra() is not found


AUDIT = """
import leakgauge
from threadpoolctl import threadpool_info
from leakgauge.harness.audit import standalone

def prepare(*_, **__):
    print({one["num_threads"] for one in threadpool_info()})
    raise SystemExit

standalone.prepare = prepare
leakgauge.audit("laplace", {}, {}, None, seed=0)
"""


@pytest.mark.matrix
def test_an_audit_from_python_runs_on_one_thread():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", AUDIT], capture_output=True, text=True, env=environment)
    assert done.stdout == "{1}\n", done.stderr


MEMORY = """
import resource
import torch
from leakgauge.harness.core.threads import one_thread

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(12_000_000)
        torch.ones(9_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

anew = faults()
with one_thread():
    faults()
    print(anew, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep memory by rules of their own")
@pytest.mark.matrix
def test_the_memory_of_a_large_model_s_arrays_is_used_again():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    anew, again = map(int, done.stdout.split())
    assert again < anew / 5, (anew, again, done.stderr)
