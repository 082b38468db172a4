"""What a model is to predict while heads are away: token sequences, and the rows whose next-token loss counts.

task = copy(loaded)                     # r r: the second half can be read off the first
task = texts(loaded, ["the bank", ...])
task = targets(loaded, Path("tasks.jsonl"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.errors import InputError
from attnscope.inputs.prompt import Prompt, place, reading
from attnscope.interventions.spec import Task
from attnscope.study.atlas.pool import begins, token_pool
from attnscope.study.atlas.probes import SEQUENCES, drafts
from attnscope.utils.files import parsed_line, read_text

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

PERIOD = 50
RECORD = 'write {"text": "...", "targets": [[12, 16]]}'


def copy(loaded: LoadedModel, *, sequences: int = SEQUENCES, seed: int = 0, pool: Sequence[int] | None = None) -> Task:
    """The probes' repeated tokens r r, as long as PERIOD if the model reads that; of r's second copy all but its first
    token count, which nothing predicts. Drawn apart from the probes, whose sequences chose the heads of each role."""
    begin = begins(loaded)
    made = drafts(token_pool(loaded, pool), begin, loaded.geometry.max_positions, sequences)
    repeated = {one.period: one for one in made if one.period is not None}
    if not repeated:
        raise InputError(f"{loaded.name} reads too few tokens to repeat any", "give it a task of your own with {on}")
    period = min(repeated, key=lambda one: abs(one - PERIOD))
    ids_ST = repeated[period]._replace(seeded_as=f"copy p{period}").drawn(seed).arms["repeated"].ids_ST
    rows = tuple(range(len(begin) + period, len(begin) + 2 * period - 1))
    ids = tuple(tuple(map(int, one)) for one in ids_ST)
    return Task("copy", ids, (rows,) * len(ids_ST), {"period": period, "seed": seed})


def texts(loaded: LoadedModel, given: Sequence[str], most: int | None = None) -> Task:
    """Natural texts, the loss of every token but the first; most: tokens that are read of each, None for all the model
    reads. Raises InputError where no text has two tokens."""
    prompts = [one for one in _prompts(loaded, given, most) if len(one) > 1]
    if not prompts:
        raise InputError("no text has two tokens", "give texts with at least two words")
    return Task(
        "texts",
        tuple(one.ids for one in prompts),
        tuple(tuple(range(len(one) - 1)) for one in prompts),
        {"texts": len(prompts)},
    )


def targets(loaded: LoadedModel, path: Path, most: int | None = None) -> Task:
    """The texts of a JSONL file, {"text": "...", "targets": [[12, 16]]} per line: tokens that hold a character of a
    range count; most: lines that are read. Raises InputError, with the line's number, for a line that is no such record
    or names no token."""
    lines = [(number, one) for number, one in enumerate(read_text(None, str(path)).splitlines(), 1) if one.strip()][
        :most
    ]
    records = [_record(line, f"{path}, line {number}") for number, line in lines]
    prompts = _prompts(loaded, [text for text, _ in records], None)
    rows = []
    for (number, _), prompt, (_, ranges) in zip(lines, prompts, records, strict=True):
        found = _named(prompt, ranges)
        if not found:
            raise InputError(f"{path}, line {number}: its targets name no token that others come before", RECORD)
        rows.append(found)
    return Task(path.name, tuple(one.ids for one in prompts), tuple(rows), {"file": str(path)})


def _record(line: str, where: str) -> tuple[str, list[tuple[int, int]]]:
    record = parsed_line(line, where, RECORD)
    text, ranges = (record.get("text"), record.get("targets")) if isinstance(record, dict) else (None, None)
    if not isinstance(text, str) or not text.strip() or not isinstance(ranges, list) or not ranges:
        raise InputError(f"{where} is not a text with targets", RECORD)
    for one in ranges:
        whole = isinstance(one, list) and len(one) == 2 and all(type(end) is int for end in one)
        if not whole or not 0 <= one[0] < one[1] <= len(text):
            raise InputError(f"{where}: {one!r} is not a range of its {len(text)} characters", RECORD)
    return text, [(start, stop) for start, stop in ranges]


def _named(prompt: Prompt, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The rows before the tokens that hold a character of a range."""
    return tuple(
        token - 1
        for token, (first, last) in enumerate(prompt.characters)
        if token and any(first < stop and start < last for start, stop in ranges)
    )


def _prompts(loaded: LoadedModel, given: Sequence[str], most: int | None) -> list[Prompt]:
    room = [one for one in (most, loaded.geometry.max_positions) if one is not None]
    with reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, chat=False)) as read:
        prompts = [read(text, False, min(room, default=None), "right") for text in given]
    for one in prompts:
        loaded.check_ids(one.ids)
    return prompts
