"""A few tries of every kind of hostile input; `scripts/fuzz.py` makes as many as one likes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import fuzz  # noqa: E402


def test_no_hostile_input_of_any_kind_is_flagged() -> None:
    tries = 4 * len(fuzz.KINDS)
    command = [sys.executable, ROOT / "scripts" / "fuzz.py", "--tries", str(tries), "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1:] == [f"{tries} tries, 0 flagged"], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("name", sorted(set(fuzz.KINDS) - {"folders"}))  # which runs a command to make one
def test_a_try_is_made_of_its_seed_alone(tmp_path: Path, name: str) -> None:
    def made(folder: Path) -> list[str]:
        folder.mkdir()
        return [word.replace(str(folder), "") for word in fuzz.KINDS[name](random.Random(3), folder).arguments]

    assert made(tmp_path / "a") == made(tmp_path / "b")


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (fuzz.Ended(70, b"", b"attnscope: internal error: a\n"), "left with 70"),
        (fuzz.Ended(2, b"", b"attnscope: internal error: a\n"), "a traceback or an internal error"),
        (fuzz.Ended(None, b"", b""), "took too long"),
        (fuzz.Ended(2, b"", b"attnscope: a\nattnscope: b\n"), "2 lines of error"),
        (fuzz.Ended(3, b"", b"a\n"), "1 lines of error"),
        (fuzz.Ended(3, b"", b"attnscope: \x1b[2J\n"), "sent U+001B"),
        (fuzz.Ended(0, "\u202e\x85".encode(), b""), "sent U+0085, U+202E"),
        (fuzz.Ended(4, b"", b"attnscope: " + b"a" * 2000 + b"\n"), "a line of 2011 characters"),
    ],
)
def test_what_is_wrong_is_flagged(tmp_path: Path, ended: "fuzz.Ended", fault: str) -> None:
    assert fault in fuzz.faults(fuzz.Try([], terminal=True), ended, tmp_path)


def test_what_is_right_is_not_flagged(tmp_path: Path) -> None:
    for ended in (fuzz.Ended(0, "日👩‍👩‍👧\n".encode(), b""), fuzz.Ended(3, b"", b"attnscope: no model; name one\n")):
        assert fuzz.faults(fuzz.Try([], terminal=True), ended, tmp_path) == []
    assert fuzz.faults(fuzz.Try([]), fuzz.Ended(0, b"\x1b", b""), tmp_path) == []  # data stays as it is
    (tmp_path / "trapped").mkdir()
    assert fuzz.faults(fuzz.Try([]), fuzz.Ended(0, b"", b""), tmp_path) == ["a pickle was run"]


def test_a_damaged_document_is_still_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for seed in range(50):
        path.write_text(json.dumps({"a": {"b": [1, 2]}, "c": 3}))
        fuzz.damage(random.Random(seed), path)
        assert path.is_file()
