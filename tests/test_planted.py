"""`scripts/faults.toml`: planted faults are still there to be planted, in every room, and each shows.

`python scripts/faults.py run` finds out what the tests find of them.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import faults  # noqa: E402

FAULTS = faults.faults(faults.FAULTS, [])


def test_every_fault_can_be_planted_and_is_python():
    for fault in FAULTS:
        wrong = fault.planted(ROOT)
        if fault.file.endswith(".py"):
            ast.parse(wrong)


def test_a_fault_whose_line_has_changed_is_told():
    fault = faults.Fault("lost-1", "attnscope/errors.py", "no such line", "", "written", "", "")
    with pytest.raises(ValueError, match=r"lost-1.*attnscope/errors\.py.*0"):
        fault.planted(ROOT)


def test_they_are_spread_over_all_rooms():
    rooms = Counter(fault.room for fault in FAULTS)
    of_python = {faults.room_of(path.relative_to(ROOT)) for path in (ROOT / "attnscope").rglob("*.py")}
    assert {room for room in of_python if rooms[room] < 3} == set()
    assert len(FAULTS) >= 80
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(fault.forked for fault in FAULTS) >= 10
    drawn = sum(fault.origin == "drawn" for fault in FAULTS)
    assert abs(drawn - len(FAULTS) / 2) < len(FAULTS) / 10


@pytest.mark.e2e
def test_the_drawn_are_drawn_by_the_seed():
    for room in {fault.room for fault in FAULTS}:
        changes = {change[1:] for change in faults.drawn(room, seed=0)}
        ours = [fault for fault in FAULTS if fault.room == room and fault.origin == "drawn"]
        assert {(fault.file, fault.before, fault.after) for fault in ours} <= changes


@pytest.mark.slow
def test_each_shows_in_what_its_command_prints():
    assert faults.show(FAULTS) == 0
