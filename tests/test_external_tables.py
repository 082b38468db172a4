"""What the judges of tables take for the same value, on made-up files. Programs of others are not started here."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from external import parquet_tools, tables
from external.common import Check

TABLE = {"columns": {"layer": [0, 1], "sees": [True, None], "token": ["a,\r", ""]}}
TYPES = {"layer": "int32", "sees": "bool", "token": "string"}
DETAIL = """FileMetaData
    version = 2
    schema = list
        SchemaElement
            name = schema
            num_children = 3
        SchemaElement
            type = 1
            repetition_type = 1
            name = layer
        SchemaElement
            repetition_type = 1
            name = sees
        SchemaElement
            type = 6
            name = token
            logicalType = LogicalType
                STRING = StringType
    num_rows = 2
    row_groups = list
"""


@pytest.mark.parametrize(
    ("value", "read", "text", "expected"),
    [
        (None, None, False, True),
        (None, "", False, False),
        (float("nan"), None, False, True),
        ("7", 7, True, True),
        ("", None, True, True),
        ("", None, False, False),
        (0.1, 0.10001, True, False),
        (0.1, 0.10000001, True, True),
        (0.1, 0.10000001, False, False),
        (1, "1", True, False),
        (1, 1.0, True, True),
    ],
)
def test_a_value_that_a_reader_gives(value: Any, read: Any, text: bool, expected: bool) -> None:
    assert tables.same(value, read, text) is expected


@pytest.mark.parametrize(
    ("value", "cell", "expected"),
    [
        (None, "", True),
        (None, "nan", False),
        (True, "True", True),
        (False, "True", False),
        (3, "3.0", True),
        (3, "3.1", False),
        (0.33338830, "0.3333883", True),
        (0.3334, "0.3333883", False),
        (0.5, "half", False),
        ("nan", "nan", True),
        ("a", "b", False),
    ],
)
def test_a_cell_that_parquet_tools_prints(value: Any, cell: str, expected: bool) -> None:
    assert parquet_tools.same(value, cell) is expected


@pytest.mark.parametrize(
    ("printed", "passed"),
    [
        ('layer,sees,token\n0,True,"a,\r"\n1,,\n\n', 3),
        ("layer,sees,token\n0,True,a\n1,,\n\n", 2),
        ('layer,sees,token\n0,True,"a,\r"\n\n', 0),
        ('layer,token\n0,"a,\r"\n1,\n\n', 2),
    ],
)
def test_the_rows_that_parquet_tools_prints(monkeypatch: pytest.MonkeyPatch, printed: str, passed: int) -> None:
    monkeypatch.setattr(parquet_tools, "said", lambda *command: printed)
    check = Check("rows")
    parquet_tools.rows_hold(check, "heads", "heads.parquet", TABLE)
    assert (check.passed, check.of) == (passed, 3)


@pytest.mark.parametrize(
    ("old", "new", "passed"),
    [
        ("", "", 4),
        ("type = 6", "type = 5", 3),
        ("name = layer", "name = head", 3),
        ("num_rows = 2", "num_rows = 20", 3),
        ("        SchemaElement\n            repetition_type = 1\n            name = sees\n", "", 1),
    ],
)
def test_the_end_of_a_file_that_parquet_tools_prints(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, passed: int
) -> None:
    monkeypatch.setattr(parquet_tools, "said", lambda *command: DETAIL.replace(old, new, 1) if old else DETAIL)
    check = Check("footer")
    parquet_tools.footer_holds(check, "heads", "heads.parquet", {**TABLE, "types": TYPES})
    assert (check.passed, check.of) == (passed, 4)


def test_a_file_that_parquet_tools_gives_up_on_holds_in_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*command: str) -> str:
        raise parquet_tools.subprocess.CalledProcessError(1, command, stderr=b"Traceback\nOSError: no page\n")

    monkeypatch.setattr(parquet_tools, "said", fails)
    check = Check("rows")
    parquet_tools.attempt(check, parquet_tools.rows_hold, "heads", "heads.parquet", TABLE)
    assert (check.passed, check.of, check.short) == (0, 1, ["heads: OSError: no page"])
