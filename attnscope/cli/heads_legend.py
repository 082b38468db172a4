"""What is printed below the table of heads: what its words mean, what it leaves out, what the text cannot show."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from attnscope.cli.heads_table import TEXT_ROLE
from attnscope.metrics.metrics import MASS
from attnscope.metrics.roles import NEEDED_ROWS, not_shown, unsupported
from attnscope.model.geometry import NOT_KNOWN
from attnscope.model.selection import has_decoder_heads, spelled

if TYPE_CHECKING:
    from attnscope.cli.heads_table import HeadsTable
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head

WORDS = {  # of the columns that are shown, as many on a line as 80 columns hold
    "kv": "kv: its shared kv head",
    "focus": "focus: how sharply it looks, away from the first token",
    "previous_token": "prev: weight on the token before",
    "induction": "induct: on what followed an earlier copy",
    "sink": "sink: weight on the first token (key 0)",
    "entropy": "entropy: spread of the weights in nats",
}
WIDTH = 80
MASS_WORDS = f"{MASS.short}: what the queries give the keys, sorts by how far above uniform"
TEXT_WORDS = f"{TEXT_ROLE}: on this text alone; -: it cannot show it"
RELATION = "strongest relation: largest weight minus 1 / keys that the query sees; ignores key 0"


def legend(table: HeadsTable, shown: Sequence[Head]) -> list[str]:
    """What the table's words mean, and how many columns had no room."""
    lines = column_words(table.names)
    marked = "; unif ≈: nearly uniform" * any(head.near_uniform for head in shown)
    uniform = f"uniform: the same numbers for attention spread uniformly{marked}"
    said = {"role": "; role -: this text cannot show it", "roles": "; roles: by a scan of the model"}
    uniform += "".join(words for title, words in said.items() if title in table.names)
    lines += [*_mass(shown), uniform, *[TEXT_WORDS] * (TEXT_ROLE in table.names), RELATION]
    if table.hidden:
        count = f"{len(table.hidden)} more column{'s' * (len(table.hidden) > 1)}"
        lines.append(f"{count}: a wider terminal, --sort METRIC or a pipe shows them")
    return lines


def column_words(names: Container[str]) -> list[str]:
    """What columns are that may need a word, by their names; as many on a line as 80 columns hold."""
    lines: list[str] = []
    for said in (said for name, said in WORDS.items() if name in names):
        if lines and len(f"{lines[-1]}; {said}") <= WIDTH:
            lines[-1] += f"; {said}"
        else:
            lines.append(said)
    return lines


def _mass(shown: Sequence[Head]) -> list[str]:
    masses = [head.mass for head in shown if head.mass is not None]
    if masses and all(map(math.isnan, masses)):
        return [f"{MASS.short} -: no query sees one of the keys"]
    return [MASS_WORDS] * bool(masses)


def without_attention(seen: Observation) -> list[str]:
    """Which layers have no attention, or not it alone: `layers 0,2 have no attention: ssm`."""
    places: dict[tuple[str, str], list[int]] = {}
    for stack, one in seen.stacks.items():
        said = [(layer, f"have no attention: {what}") for layer, what in one.others.items()]
        said += [(layer, f"have {what} in parallel with their attention") for layer, what in one.partners.items()]
        said += [(key.layer, f"are called {keys}") for key, keys in one.visible.items() if keys.endswith(NOT_KNOWN)]
        for layer, what in said:
            places.setdefault((f"{stack} " * (stack in seen.other_stacks), what), []).append(layer)
    return [f"{stack}layers {spelled(layers)} {what}" for (stack, what), layers in places.items()]


def missing_support(seen: Observation) -> list[str]:
    """What the text is too short, or repeats too little, to show in some layers; and what shows it."""
    if seen.of_two_texts:
        return []  # roles are of one text
    asked, of_text = seen.chosen.query, "text " * (seen.atlas is not None)  # an atlas needs no text for its roles
    if asked and len(asked.positions) < NEEDED_ROWS:
        return [f"no {of_text}roles: they need at least {NEEDED_ROWS} queries, got {len(asked.positions)}"]
    where: dict[str, list[tuple[int, str]]] = {}
    for key, support in seen.support.items():
        for line in _too_few(support, "this text has" if asked is None else "these queries have", key.stack):
            where.setdefault(line, []).append((key.layer, seen.visible[key]))
    lines = [
        f"{'text roles ' * bool(of_text)}not judged{_in_layers(places) * (len(places) < len(seen.support))}: {line}"
        for line, places in where.items()
    ]
    if lines and not seen.atlas and all(has_decoder_heads(key.stack) for key in seen.support):
        name = seen.facts["model"]["name"]
        lines[-1] += f"; attnscope scan {name} --out DIR finds roles without a text, --atlas DIR shows them"
    return lines


def _too_few(support: Mapping[str, int], who_has: str, stack: str) -> list[str]:
    """Why roles cannot be judged, each role's reason; of many roles their names."""
    found = not_shown(support, stack)
    if len(found) <= 1:
        return unsupported(support, who_has, stack)
    names = [name for some in found.values() for name in some]
    return [f"{', '.join(names)}: {who_has} too few tokens, or too few that are repeated"]


def _in_layers(places: Sequence[tuple[int, str]]) -> str:
    stacks = dict.fromkeys(stack for _, stack in places)
    return f" in layers {spelled([layer for layer, _ in places])} ({', '.join(stacks)})"
