"""A question's command in a process of its own: what it says, as lines of JSON, and after them its page.

It runs as a person's would: it asks the server for what a model observes, and its page is the one that it writes.
Whoever stops listening ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anyio import CancelScope

from attnscope.errors import AttnscopeError
from attnscope.live.question import PAGE, LiveQuestion
from attnscope.model.options import LoadOptions

COMMAND = (sys.executable, "-P", "-m", "attnscope")
MOST_SECONDS = 3600.0
MOST_LINE = 2**20
MOST_PAGE = 2**28
GOING_SECONDS = 3.0  # from Ctrl-C to the end
SAID = {"ATTNSCOPE_STAGES": "json", "NO_COLOR": "1"}


async def answer(
    question: LiveQuestion, held: Sequence[LoadOptions], where: str | None = None
) -> AsyncGenerator[bytes, None]:
    """Lines of JSON: `said`, or `stage`; the last is `failed`, or `page` with so many bytes, which follow.

    where: the folder that its command runs in, if not this one. No line names the folder of the question, which is gone
    with the answer.
    """
    with TemporaryDirectory(prefix="attnscope-page-") as place:
        folder = Path(place)
        try:
            process = await _begun(question.arguments(held, folder), where)
        except (AttnscopeError, OSError) as error:
            yield _line(failed=str(error))
            return
        # The command reads its text while it prints: sending it first could wait for ever, with both pipes full.
        last_line = ""
        sending = asyncio.create_task(_send(process, question.text.encode(errors="surrogatepass")))
        try:
            async with asyncio.timeout(MOST_SECONDS):
                while line := (await _next(process)).replace(f"{folder}{os.sep}", ""):
                    last_line = line if not line.startswith("{") else last_line
                    yield line.encode() + b"\n" if line.startswith("{") else _line(said=line)
                code = await process.wait()
        except TimeoutError:
            yield _line(failed=f"stopped: it took over {MOST_SECONDS:.0f} seconds")
            return
        finally:  # also where whoever asked stops listening
            sending.cancel()
            with CancelScope(shield=True):
                await _ended(process)
        # A command that failed has written no page; the last line that it printed says why.
        page = folder / PAGE
        if not page.is_file() or page.stat().st_size > MOST_PAGE:
            nothing = f"the command ended with the code {code} and printed nothing"
            yield _line(failed=last_line.removeprefix("attnscope: ") or nothing)
            return
        data = page.read_bytes()
        yield _line(page=len(data), code=code)
        yield data


async def _begun(words: Sequence[str], where: str | None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=where,
        env=os.environ | SAID,
        limit=MOST_LINE,
    )


async def _send(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(text)
        await process.stdin.drain()
        process.stdin.close()


async def _next(process: asyncio.subprocess.Process) -> str:
    """The next line that it says, empty at the end; one that is too long is left out."""
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        text = line.decode(errors="replace").rstrip("\n")
        if text or not line:
            return text


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End it: as Ctrl-C does, then at once."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GOING_SECONDS)


def _line(**said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"
