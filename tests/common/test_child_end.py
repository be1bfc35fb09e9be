"""Why a child process ended, in words."""

import signal
import subprocess
import sys

import pytest

from octavo.common import resources
from octavo.common.child_end import why_it_ended
from octavo.common.resources import OomKills, oom_kills


def test_exit_codes_and_other_signals():
    before = OomKills(None, None)
    assert why_it_ended(3, before, "r") == "exit code 3"
    assert why_it_ended(-signal.SIGSEGV, before, "r") == "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (OomKills(1, 1), ": the kernel ended it for lack of memory; lower it"),
        (OomKills(0, 1), ", but not by the kernel for lack of memory"),
        (OomKills(None, 1), ": the kernel probably ended it for lack of memory; lower it"),
    ],
)
def test_whether_memory_ran_out(now, said, monkeypatch):
    monkeypatch.setattr(resources, "oom_kills", lambda: now)
    assert why_it_ended(-signal.SIGKILL, OomKills(0, 0), "lower it") == f"killed by SIGKILL{said}"


@pytest.mark.skipif(oom_kills() == OomKills(None, None), reason="the kernel has no counter")
def test_a_real_kill_that_is_not_the_kernels():
    before = oom_kills()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    assert "not by the kernel" in why_it_ended(child.wait(), before, "")
