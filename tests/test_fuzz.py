"""A try of every kind of hostile input; `scripts/fuzz.py` makes as many as one likes."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import fuzz  # noqa: E402, F401
from fuzzing import browsing, drawing, folders, pages  # noqa: E402
from fuzzing.judging import MEMORY, beside, faults, lay_out  # noqa: E402
from fuzzing.trying import KINDS, YES, Ended, Try, fork  # noqa: E402
from fuzzing.words import JSONS, damage, odd_file, spoil  # noqa: E402

from helpers import fuzzed  # noqa: E402
from helpers.forks import forked  # noqa: E402

AFTER_A_COMMAND = {  # which damage what a command has left
    "addresses",
    "environments",
    "studies",
    "stopped_studies",
    "atlases",
    "foreign_tables",
    "folders",
    "manifests",
    "baselines",
    "links",
    "pages",
    "kernels",
    "gguf_files",
}
MADE_FIRST = {"redrawn", "targets"}  # which damage what takes seconds to make
ALONE = sorted(set(KINDS) - AFTER_A_COMMAND)
# A first import of the compiler, which the reader of quantised weights needs, makes a folder; the others take long.
QUICK = sorted(
    {*ALONE} - MADE_FIRST - {"quantised", "pictures", "large", "full_disks", "processors", "generation", "templates"}
)


@pytest.fixture(scope="module")
def flagged() -> dict[str, list[str]]:
    """{kind: what was flagged of one try}."""
    done = forked(fuzzed.__file__, *QUICK)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", QUICK)
def test_one_hostile_input_of_a_kind_is_not_flagged(flagged: dict[str, list[str]], name: str) -> None:
    assert flagged[name] == []


@pytest.mark.e2e
@pytest.mark.timeout(900)  # commands run first whose folders are damaged then, and all are in forks of one process
def test_no_hostile_input_of_any_kind_is_flagged() -> None:
    tries = len(KINDS)
    command = [sys.executable, ROOT / "scripts" / "fuzz.py", "--tries", str(tries), "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1:] == [f"{tries} tries, 0 flagged"], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.e2e) if one in MADE_FIRST else one for one in ALONE]
)
def test_a_try_is_made_of_its_seed_alone(tmp_path: Path, name: str) -> None:
    def made(place: Path) -> tuple[list[str], list[tuple[str, int]]]:
        folder = lay_out(place)
        one = KINDS[name](random.Random(3), folder)
        files = [(str(path.relative_to(place)), path.lstat().st_size) for path in sorted(place.rglob("*"))]
        return [word.replace(str(folder), "") for word in one.arguments], files

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert made(tmp_path / "a") == made(tmp_path / "b")


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (Ended(70, b"", b"attnscope: internal error: a\n"), "left with 70"),
        (Ended(-11), "left with -11"),
        (Ended(2, b"", b"attnscope: internal error: a\n"), "a traceback or an internal error"),
        (Ended(None, b"", b""), "took too long"),
        (Ended(2, b"", b"attnscope: a\nattnscope: b\n"), "2 lines of error"),
        (Ended(3, b"", b"a\n"), "1 lines of error"),
        (Ended(3, b"", b"attnscope: \x1b[2J\n"), "sent U+001B"),
        (Ended(0, "\u202e\x85".encode(), b""), "sent U+0085, U+202E"),
        (Ended(4, b"", b"attnscope: " + b"a" * 2000 + b"\n"), "a line of 2011 characters"),
        (Ended(0, b"", b"Converting: 100%\n"), "talk under -q"),
        (Ended(0, memory=MEMORY + 2**30), "took 5.5 GiB"),
        (Ended(5, b"", b"attnscope: out of memory; a\n"), "took all the memory that it was given"),
        (Ended(0, read=2), "2 bytes of stdin were read"),
        (Ended(98, heard=("asked the network",)), "asked the network"),
    ],
)
def test_what_is_wrong_is_flagged(tmp_path: Path, ended: Ended, fault: str) -> None:
    assert fault in faults(Try(["-q"], terminal=True), ended, tmp_path)


def test_what_is_right_is_not_flagged(tmp_path: Path) -> None:
    for ended in (Ended(0, "日👩‍👩‍👧\n".encode(), b""), Ended(3, b"", b"attnscope: no model; name one\n")):
        assert faults(Try([], terminal=True), ended, tmp_path) == []
    for form in ("csv", "tsv"):
        assert faults(Try(["--format", form], terminal=True), Ended(0, b"a\tb\n"), tmp_path) == []
    assert faults(Try([]), Ended(0, b"\x1b", b""), tmp_path) == []  # data stays as it is
    assert faults(Try(["--file", "-"]), Ended(0, read=9), tmp_path) == []
    (tmp_path / "trapped").mkdir()
    assert faults(Try([]), Ended(0, b"", b""), tmp_path) == ["code of a file was run"]


def asks_the_network() -> None:
    socket.create_connection(("localhost", 9))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (input, f"{len(YES)} bytes of stdin were read"),
        (lambda: os.mkdir("trapped"), "code of a file was run"),
        (lambda: Path("../outside/kept.txt").write_text("lost"), "changed outside/kept.txt, which is not its own"),
        pytest.param(
            lambda: Path("../outside/kept.txt").unlink(),
            "changed outside/kept.txt, which is not its own",
            marks=pytest.mark.e2e,  # seen as what is changed
        ),
        (lambda: Path("../home/.config").mkdir(), "changed home/.config, which is not its own"),
        (lambda: Path("pytorch_model.bin").write_bytes(b""), "opened a pickle"),
        (asks_the_network, "asked the network"),
        (lambda: os.kill(os.getpid(), 11), "left with -11"),
        (lambda: bytearray(2**40), "left with 99"),
    ],
    ids=["input", "code", "changed", "removed", "home", "pickle", "network", "signal", "too much memory"],
)
def test_what_a_try_does_is_seen(tmp_path: Path, wrong: Callable[[], object], fault: str) -> None:
    folder = lay_out(tmp_path)
    before, one = beside(folder), Try(["metrics"], before=wrong)
    found = faults(one, fork(one, folder), folder, before)
    assert any(one.startswith(fault) for one in found), found


@pytest.mark.parametrize(("taken", "fault"), [(0, False), (2**28 + 2**27, True)])
def test_the_memory_that_a_try_takes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, fault: bool
) -> None:
    """Of a smaller allowance than MEMORY: to take so much takes seconds."""
    monkeypatch.setattr("fuzzing.judging.MEMORY", 2**28)
    folder = lay_out(tmp_path)
    one = Try(["metrics"], before=lambda: bytearray(taken))
    assert any(found.startswith("took 0.") for found in faults(one, fork(one, folder), folder)) == fault


def test_a_try_that_does_nothing_wrong_is_not_flagged(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    for one in (Try(["metrics"]), Try(["metrics"], terminal=True), Try(["metrics"], None), Try(["metrics"], folder)):
        before, ended = beside(folder), fork(one, folder)
        assert faults(one, ended, folder, before) == []
        assert ended.code == 0
        assert (b"\xe2\x94\x80" in ended.out) == one.terminal  # a line of a table


def test_a_damaged_document_is_still_a_file_and_an_odd_one_is_none(tmp_path: Path) -> None:
    shared = json.dumps(JSONS)
    for seed in range(200):
        path = tmp_path / f"{seed}.json"
        path.write_text(json.dumps({"a": {"b": [1, 2]}, "c": 3}))
        damage(random.Random(seed), path)
        spoil(random.Random(seed), path)
        assert path.is_file()
        odd_file(random.Random(seed), path)
        spoil(random.Random(seed), path)  # which waits for no pipe
        assert not path.is_file() or path.stat().st_size > 2**30 or path.is_symlink()
    assert json.dumps(JSONS) == shared  # the values that documents are damaged with stay as they are


def test_a_picture_that_no_browser_opens_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg><title>a</title></svg>")
    assert [*drawing.of_pictures(tmp_path)(Ended(0))] == []
    (tmp_path / "a.svg").write_text("<svg><title>\u202ea</title></svg>")
    assert [*drawing.of_pictures(tmp_path)(Ended(0))] == ["a.svg holds U+202E"]
    (tmp_path / "a.svg").write_text("<svg><title>\uffff</title></svg>")
    assert "is no XML" in next(iter(drawing.of_pictures(tmp_path)(Ended(0))))


def test_a_half_file_is_found(tmp_path: Path) -> None:
    (tmp_path / ".partial").mkdir()
    for name in (".lock", ".partial/.heads.csv.0123abcd", "heads.csv"):
        (tmp_path / name).touch()
    assert [*folders.without_halves(tmp_path)(Ended(2))] == []
    (tmp_path / ".heads.csv.0123abcd").touch()
    assert [*folders.without_halves(tmp_path)(Ended(2))] == ["left .heads.csv.0123abcd"]


@pytest.mark.parametrize(
    ("side", "open_", "fault"),
    [
        ({"model": {"name": "a", "layers": 4}, "metrics": [{}]}, "view=metrics&at=0", None),
        ({"model": {"name": "a", "layers": 4}, "metrics": []}, "view=metrics&at=0", "metrics that it does not have"),
        ({"model": {"layers": {"toString": "x"}}, "metrics": [{}]}, "", "neither word nor number"),
    ],
)
def test_data_that_a_page_cannot_show_is_found(side, open_: str, fault: str | None) -> None:
    data = json.dumps({"sides": [side], "open": open_})
    page = f'<script type="application/json" id="page">{data}</script>\n'
    found = [*pages.of_page(Path("absent"))(Ended(0, page.encode()))]
    assert found == [] if fault is None else [fault in one for one in found] == [True]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p title='a'>&lt;img src=x onerror=a&gt; b</p><script>\u202e</script>", None),
        ("<p>a\u200db</p>", None),
        ("<p>a\u202eb</p>", "the page shows U+202E"),
        ("<p title='\x1b'>a</p>", "the page shows U+001B"),
        ("<p>This page cannot be shown: TypeError</p>", "the page 'cannot be shown: TypeError'"),
        ("<img src=x onerror=a>", "the page ran what it shows"),
        ("<title>trapped</title>", "the page ran what it shows"),
    ],
)
def test_what_a_page_shows_is_judged(body: str, fault: str | None) -> None:
    found = browsing.wrong_in(f"<html><body>{body}</body></html>")
    assert found == ([] if fault is None else [fault])
