"""Rows read back from what attnscope writes as CSV and as JSON lines."""

import csv
import io
import json
from typing import Any


def csv_rows(data: bytes) -> list[dict[str, str]]:
    """The rows of CSV, by column."""
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def json_lines(data: bytes) -> list[Any]:
    """The object of each line of JSON."""
    return [json.loads(line) for line in data.splitlines()]
