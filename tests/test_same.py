"""`scripts/same.py` compares what two trees print and write: tried on trees that print a line and write a file."""

import sys
from pathlib import Path

import pytest

from attnscope.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import same  # noqa: E402

PROGRAM = """
import os, time
print("rank,head\\n{first}")
open("heads.csv", "w").write(os.getcwd() + " at 2026-11-29T03:00:{second}Z\\n{written}")
{more}
"""


def tree(folder: Path, first: str = "1,L0H0", second: str = "00", written: str = "L0H0", more: str = "") -> Path:
    """A tree whose every command prints two lines and writes its folder, the time and a head into a file."""
    (folder / "attnscope").mkdir(parents=True)
    (folder / "examples").mkdir()
    (folder / "attnscope" / "__init__.py").touch()
    program = PROGRAM.format(first=first, second=second, written=written, more=more)
    (folder / "attnscope" / "__main__.py").write_text(program)
    return folder


def compared(*trees: Path, expect: str = "") -> int:
    """The script's exit code over one case."""
    meant = trees[0] / "meant.tsv"
    meant.write_text(expect)
    return same.main([*map(str, trees), "--only", "rollout", "--expect", str(meant)])


def test_times_and_folders_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tree(tmp_path / "a"), tree(tmp_path / "other", second="59")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 cases are the same"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"first": "1,L0H1"}, "stdout"),
        ({"written": "L0H1"}, "heads.csv"),
        ({"more": "import sys; sys.exit(3)"}, "exit code"),
        ({"more": "import sys; print('3 heads', file=sys.stderr)"}, "stderr"),
        ({"more": "open('new.csv', 'w').close()"}, "new.csv"),
    ],
    ids=str,
)
def test_what_differs_is_found(
    tmp_path: Path, change: dict[str, str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tree(tmp_path / "a"), tree(tmp_path / "b", **change)) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT in 1" in out
    assert out.splitlines()[1].endswith(part)


@pytest.mark.e2e
def test_tables_are_compared_by_types_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parquet of two encodings is the same; of other values or types it is not."""
    table = "import pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({{'head': {}}}), 'out.parquet', {})"
    plain, other = "pa.array([1, 2])", "pa.array([1, 3])"
    first = tree(tmp_path / "a", more=table.format(plain, "compression='none'"))
    assert compared(first, tree(tmp_path / "b", more=table.format(plain, "compression='zstd'"))) == 0
    for name, column in (("c", other), ("d", "pa.array([1, 2], pa.int32())")):
        assert compared(first, tree(tmp_path / name, more=table.format(column, "compression='none'"))) == 1
    assert '+{"head": 3}' in capsys.readouterr().out


def test_a_line_that_only_a_silence_brings_is_not_printed(tmp_path: Path) -> None:
    stage = "import sys; from attnscope.utils import stages; print(stages.FIRST_SECONDS < 1e9, file=sys.stderr)"
    silent = tree(tmp_path / "a", more=stage)
    (silent / "attnscope" / "utils").mkdir()
    (silent / "attnscope" / "utils" / "stages.py").write_text("FIRST_SECONDS = 1.0")
    parts = same.run("rollout", silent, tmp_path / "run", tmp_path).parts
    [messages] = [content for name, content in parts.items() if name.endswith(same.STDERR)]
    assert messages == b"False\n"


def test_what_a_change_means_to_make_is_named(tmp_path: Path) -> None:
    sides = tree(tmp_path / "a"), tree(tmp_path / "b", written="L0H1")
    assert compared(*sides, expect="rollout\tL0H[01]$\n") == 0
    assert compared(*sides, expect="keys\tL0H[01]$\n") == 1
    assert compared(*sides, expect="rollout\tL0H0$\n") == 1


def test_every_command_is_run_and_asked_for_its_help() -> None:
    run = {command.split()[0] for commands in same.CASES.values() for command in commands}
    assert set(same.COMMANDS) == set(COMMANDS)
    assert run >= set(same.COMMANDS) - {"serve", "run"}
