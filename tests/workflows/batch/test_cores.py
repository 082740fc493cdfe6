"""Processes of one machine that run at once have cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is nothing to divide")
def test_processes_at_once_have_cores_of_their_own() -> None:
    program = "from bridge.workflows.batch.engines.ray.rows import own_cores as own\nimport os\nwith own(1):\n"
    program += "    print(*os.sched_getaffinity(0), flush=True)\n    input()\nprint(len(os.sched_getaffinity(0)))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    several = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(2)]  # type: ignore[call-overload]
    cores = [process.stdout.readline().split() for process in several]
    assert all(len(own) == 1 for own in cores)
    assert cores[0] != cores[1]
    after = [process.communicate("\n")[0].strip() for process in several]
    assert after == [str(len(os.sched_getaffinity(0)))] * 2
