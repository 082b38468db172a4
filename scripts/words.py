"""Words per sentence of pages: `python scripts/words.py README.md docs/*.md`, or `-` for a page on standard input.

Left out are tables, headings, code, pictures, and what a script writes between marks. A paragraph and an item of a list
end a sentence, a colon does not. A span of code counts as one word.
"""

import re
import sys
from pathlib import Path

MADE = re.compile(r"<!-- (\w+): written by .*?<!-- \1 end -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|^ {4}\S[^\n]*$|<[^>]*>|!\[[^\]]*\]\([^)]*\)", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^(?:\||#|---).*$", re.MULTILINE)  # a row of a table, a heading
END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!al\.)(?<!vs\.)(?<=[.!?])[)\"*_]*\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s")


def sentences(page: str) -> list[int]:
    """How many words each sentence of a page has."""
    text = LINE.sub("", CODE.sub("\n\n", MADE.sub("", page)))
    text = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", text))
    counts = (len(re.findall(r"[^\W_](?:[\w'’.,/-]*\w)?", part)) for part in END.split(text))
    return [count for count in counts if count]


def mean(page: str) -> float:
    """Words per sentence."""
    counts = sentences(page)
    return sum(counts) / len(counts) if counts else 0.0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
        counts = sentences(page)
        print(f"{mean(page):5.1f} words, longest {max(counts, default=0):3}, {len(counts):3} sentences  {name}")
