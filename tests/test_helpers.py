"""What the tests go by: an environment that no shell changes, and work that is counted."""

import os

from helpers.environment import KEPT, PINNED, pin
from helpers.work import steps


def test_no_shell_changes_what_the_tests_see() -> None:
    there = {"PATH": "/bin", "HOME": "/home/a", "ATTNSCOPE_REQUIRE_BROWSER": "1"}
    shells = {
        "NO_COLOR": "1",
        "COLUMNS": "40",
        "HF_HOME": "/elsewhere",
        "HF_TOKEN": "hf_x",
        "TERM": "dumb",
        "LC_ALL": "C",
    }
    shells |= {"OMP_NUM_THREADS": "64", "ATTNSCOPE_READING_SECONDS": "1", "TRANSFORMERS_VERBOSITY": "debug"}
    found = there | shells
    pin(found)
    assert found == there | PINNED
    assert {name: os.environ[name] for name in PINNED} == PINNED
    assert not any(name.startswith("ATTNSCOPE_") for name in os.environ.keys() - KEPT - PINNED.keys())


def test_work_is_counted_the_same_every_time() -> None:
    def squared(size: int) -> int:
        return steps(lambda: [[column + 1 for column in range(size)] for _ in range(size)])

    assert squared(10) == squared(10)
    assert 50 < squared(100) / squared(10) < 101
