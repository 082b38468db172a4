"""`tests/sweep.json`, what the sweep of every type gave, and what is made of it: a table, the end of a page."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

from attnscope.model.selection import MIXING, VISION
from helpers.sweep import CERTIFIED, FAULTS, NOT_BUILT, READ, REFUSED, REGISTRIES, TOKENS, Swept

KEPT = Path(__file__).parents[1] / "sweep.json"
MODELS = Path(transformers.__file__).parent / "models"
SINCE = "5.17.0"
NEW = """
    bailing_hybrid beam dots3_note embedding_gemma2 flint gradium_phonon_tts granite_docling gte hyperclovax_vision_v2
    inkling2 internlm3 iquestcoder jev kolibri1 lfm3 lfm3_vl minicpm_ocr minicpmv4_7 mistral_large4 molmo2
    moss_transcribe_diarize muse_spark nemotron3_5_transcribe nemotron3_diarization nemotron_h_omni pocket_tts
    pocket_tts_audio_tokenizer pp_doclayout_v4 ultrabert ultravbert unlimited_ocr
""".split()  # noqa: SIM905
Rows = Mapping[str, Mapping[str, Any]]  # "type in registry" -> what is kept of its Swept


def kept() -> dict[str, Any]:
    """What was swept last: the release, a hash of each modelling file, and a row for each type in each registry."""
    found: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
    return found


def keep(results: Iterable[Swept], others: Rows | None = None) -> None:
    """Write it, a line for each file and each row; others: rows that stay as they are where there is no new one."""
    rows = {**(others or {}), **{f"{one.type} in {one.registry}": row(one) for one in results}}
    parts = {"files": file_hashes(), "types": {name: rows[name] for name in sorted(rows)}}
    lines = [f'{{\n"transformers": "{transformers.__version__}"']
    for part, of_part in parts.items():
        inside = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in of_part.items())
        lines.append(f'"{part}": {{\n{inside}\n}}')
    KEPT.write_text(",\n".join(lines) + "\n}\n", "utf-8")


def row(result: Swept) -> dict[str, Any]:
    """What is the same on every machine."""
    levels = sorted(set(result.levels.values()), key=("none", "scores", "full").index)
    return {
        "outcome": result.outcome,
        "level": levels[0] if levels else None,
        "maps": result.maps,
        "equal": None if result.difference is None else True,
        "why": _plain(result.why, result.type),
    }


def file_hashes() -> dict[str, str]:
    """{modelling file: hash} of the release that is installed."""
    files = sorted(MODELS.glob("*/modeling_*.py"))
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest()[:12] for one in files}


def changed(before: Mapping[str, str]) -> set[str]:
    """The folders whose modelling files are others than these, or new."""
    there = file_hashes()
    return {path.parent.name for path in MODELS.glob("*/modeling_*.py") if before.get(path.name) != there[path.name]}


def folders() -> list[str]:
    """Those of transformers' models."""
    return sorted(path.name for path in MODELS.iterdir() if path.is_dir() and not path.name.startswith("__"))


EVERY = "## Every type"
HEAD = (
    EVERY
    + """

From the sweep of `tests/test_sweep.py` over all types that transformers {transformers} has a causal, a base or an
image-text model of: {types} types, {models} models. Of the folders that have none of these it takes one model each
(*others*). Each is built small with every parameter drawn at random, saved as its own class, loaded from its folder.
It reads a text of {tokens} tokens, an encoder-decoder with a target and without, a model of pictures alone a picture.
Every map must be equal to the one that transformers returns itself, to 1e-6. A map of a layer without a softmax, times
its values, must be its output. No module that calls the attention
interface may be left out. A map looks ahead where config and class say so. *refused*: in one line, with why.
{not_built} types of the three registries ({percent:.1f} %) cannot be built small here. [types.csv](families/types.csv)
has a row of each with the folder of its code, and of folders that have no model.
"""
)
FULL, SCORES, NONE = (f"a text read, equal, parity {level}" for level in ("*full*", "*scores*", "*none*"))
RULES = "a text read by rules without a softmax, map times values equal, parity *none*"
SEEN, SEEN_ALONE = "a picture read, equal, parity *full* or *scores*", "a picture read, equal, parity *none*"
NO_TYPE = "in no registry of models: tokenizers, processors, parts"


def every_type(stored: Mapping[str, Any] | None = None) -> str:
    """The last part of the document."""
    stored = stored or kept()
    rows: Rows = stored["types"]
    absent, share = not_built(rows)
    head = HEAD.format(
        transformers=stored["transformers"],
        types=len({name.partition(" in ")[0] for name in rows}),
        models=len(rows),
        tokens=TOKENS,
        not_built=absent,
        percent=100 * share,
    )
    return "\n".join([head, *_counts(rows)])


COLUMNS = ("type", "registry", "folder", "outcome", "new", "why")


def types(stored: Mapping[str, Any] | None = None) -> list[tuple[str, ...]]:
    """A row for each type in each registry, then one for each folder that has none. new: since the release SINCE."""
    rows: Rows = (stored or kept())["types"]
    found, there = [], set()
    for name, of in rows.items():
        model_type, _, registry = name.partition(" in ")
        folder = model_type_to_module_name(model_type)
        there.add(folder)
        found.append((model_type, registry, folder, _group(of).replace("*", ""), _is_new(folder), of["why"]))
    return found + [("", "", folder, NO_TYPE, _is_new(folder), "") for folder in folders() if folder not in there]


def _is_new(folder: str) -> str:
    return "yes" if folder in NEW else ""


def not_built(rows: Rows) -> tuple[int, float]:
    """How many types of the three registries cannot be built small in any, and their share."""
    of_three = {name: of for name, of in rows.items() if not name.endswith(" in others")}
    types = {name.partition(" in ")[0] for name in of_three}
    built = {name.partition(" in ")[0] for name, of in of_three.items() if of["outcome"] != NOT_BUILT}
    return len(types - built), len(types - built) / len(types)


def _counts(rows: Rows) -> list[str]:
    groups = [_group(of) for of in rows.values()]
    counts = {(group, name.partition(" in ")[2]): 0 for group in ORDER for name in rows}
    for name, group in zip(rows, groups, strict=True):
        counts[group, name.partition(" in ")[2]] += 1
    lines = [f"| outcome | {' | '.join(REGISTRIES)} |", f"|---|{'---|' * len(REGISTRIES)}"]
    for group in ORDER:
        if group in groups:
            lines.append(f"| {group} | {' | '.join(str(counts[group, one]) for one in REGISTRIES)} |")
    return lines


REFUSALS = {  # what a refusal says, and what is refused in such words
    "reads pictures|not a model of text": "refused: reads pictures otherwise, or other signals",
    "reads sound": "refused: reads sound, and was given a text",
    "cannot be read: it": "refused: has no maps of tokens",
}
OTHER_REFUSAL = "refused for another reason"
ORDER = (FULL, SCORES, NONE, RULES, SEEN, SEEN_ALONE, *REFUSALS.values(), OTHER_REFUSAL, NOT_BUILT, *FAULTS)


def _group(of: Mapping[str, Any]) -> str:
    if of["outcome"] == REFUSED:
        return next((kind for said, kind in REFUSALS.items() if re.search(said, of["why"])), OTHER_REFUSAL)
    if of["outcome"] not in (CERTIFIED, READ):
        return str(of["outcome"])
    certified = of["outcome"] == CERTIFIED
    if [*of["maps"]] == [VISION]:
        return SEEN if certified else SEEN_ALONE
    if of["maps"] and {*of["maps"]} <= {*MIXING}:
        return RULES
    return (FULL if of["level"] == "full" else SCORES) if certified else NONE


def _plain(why: str, model_type: str) -> str:
    """A reason without the next step, and without the names of this type and of its classes."""
    why = re.split(r"; |\. You can| Model type should| Check out| Please| neither in ", why.replace("|", "/"))[0]
    return re.sub(r"\b[A-Z]\w+?(Model|For\w+|Config)\b", "CLASS", re.sub(rf"\b{re.escape(model_type)}\b", "TYPE", why))
