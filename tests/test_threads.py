"""One thread a process, and the number before afterwards."""

import os
import subprocess
import sys

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from leakgauge.harness.core.threads import one_thread


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
