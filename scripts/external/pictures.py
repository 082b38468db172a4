"""Pictures as pngcheck, xmllint and qpdf see them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from external.common import Report, arguments

FIGURES = "overview,layers,heads,metrics,mass,top"
TEXT = "the financial bank & a <b>lake</b> are located on river bank"


def wrong_crc(whole: bytes) -> bytes:
    """A bit of the CRC of the first chunk, after signature, length, name and 13 bytes."""
    place = 8 + 4 + 4 + 13
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def unclosed(whole: bytes) -> bytes:
    """The last group is not closed."""
    before, _, after = whole.rpartition(b"</g>")
    return before + after


def broken_table(whole: bytes) -> bytes:
    """The file says that its table of objects begins at another byte."""
    before, mark, after = whole.rpartition(b"startxref\n")
    return before + mark + b"1" + after


@dataclass(frozen=True)
class Validator:
    """A program that ends with another exit code than 0 where a file is damaged."""

    command: tuple[str, ...]
    version: tuple[str, ...]
    damage: Callable[[bytes], bytes]
    fault: str

    def accepts(self, path: Path) -> tuple[bool, str]:
        """Whether it finds nothing, and the last line of what it says."""
        done = subprocess.run([*self.command, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode == 0, (done.stdout.splitlines() or [""])[-1]


VALIDATORS = {
    "png": Validator(("pngcheck", "-q"), ("pngcheck", "-h"), wrong_crc, "a PNG with a wrong CRC"),
    "svg": Validator(
        ("xmllint", "--noout", "--nonet"),
        ("xmllint", "--version"),
        unclosed,
        "an SVG with an unclosed element",
    ),
    "pdf": Validator(("qpdf", "--check"), ("qpdf", "--version"), broken_table, "a PDF with a broken xref"),
}


def written(folder: Path, kind: str) -> list[Path]:
    """The pictures of a run, as the command draws them."""
    out = folder / kind
    asked = ["--query", "last", "--key", "bank", "--figures", FIGURES, "--image", kind, "--out", str(out), "--quiet"]
    subprocess.run([sys.executable, "-m", "attnscope", "heads", TEXT, *asked], check=True, stdout=subprocess.DEVNULL)
    return sorted(out.rglob(f"*.{kind}"))


def first_line(command: tuple[str, ...]) -> str:
    """What a program says of its version."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )
    line = next(filter(None, done.stdout.splitlines()), "")
    return next((word.rstrip(",") for word in line.split() if word[0].isdigit()), line)


def main() -> None:
    """A check and a control for each kind of picture."""
    asked, folder = arguments(), Path.cwd()
    report = Report(("attnscope",))
    for kind, validator in VALIDATORS.items():
        program = validator.command[0]
        if shutil.which(program) is None:
            report.not_had.append(f"{program}: not installed")
            continue
        report.version[program] = first_line(validator.version)
        with report.check(f"{program} finds nothing in any {kind.upper()}") as check:
            paths = written(folder, kind)
            for path in paths:
                held, said = validator.accepts(path)
                check.hold(held, f"{path.relative_to(folder)}: {said}")
        with report.control(f"{program}: {validator.fault}") as check:
            for path in paths:
                damaged = path.with_stem(f"{path.stem}-damaged")
                damaged.write_bytes(validator.damage(path.read_bytes()))
                check.hold(validator.accepts(damaged)[0])
    report.write(asked.out)


if __name__ == "__main__":
    main()
