"""An observation -> a folder of tables, figures and a manifest.

    export(seen, Path("runs/bank"))     # heads.csv, relations.csv, overview.png, layers/, metrics.png, manifest.json

A path is made of layer and head numbers, never of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.drawing import FIGURES, Advance, Drawing, save_rollout
from attnscope.errors import UsageError
from attnscope.figures import Style
from attnscope.files import save_json
from attnscope.model.libraries import versions
from attnscope.tables import save

if TYPE_CHECKING:
    from attnscope.observation import Observation

SCHEMA = "run/2"  # of a folder; goes up when a file or a column is renamed, or means something else
MOST_HEADS = 20  # drawn one by one where nobody says which


def export(
    seen: Observation,
    folder: str | Path,
    *,
    figures: Sequence[str] = FIGURES,
    heads: Sequence[str] | None = None,
    style: Style = Style(),
    sort: str | None = None,
    min_weight: float | None = None,
    top_k: int | None = None,
    keys: bool = False,
    options: Mapping[str, Any] | None = None,
    workers: int | None = 1,
    advance: Advance = lambda steps: None,
) -> list[Path]:
    """Write what an observation kept: tables, figures, and last manifest.json; returns the paths.

    figures: kinds of FIGURES; those of maps only where maps were kept. heads: names of those drawn one by one (`L1H4`),
    the first 20 without. sort: a metric by which heads.csv and those 20 are ordered. min_weight, top_k: which relations
    and shares of a rollout are listed. keys: whether to list what every token receives. options: what the manifest says
    was asked for. workers: processes that draw heads, None for as many as pay. advance: told after every picture.
    Raises UsageError for a folder that cannot be written.

        >>> export(seen, "runs/bank", figures=("overview",), style=Style(scale="log"))
    """
    for kind in figures:
        if kind not in FIGURES:
            raise UsageError(f"there is no figure {kind!r}", f"the figures are {', '.join(FIGURES)}")
    made, written = writable(Path(folder)), list[Path]()
    if seen.columns.scores:
        written.append(save(seen.table(sort), made / "heads.csv"))
    if seen.kept_keys is not None:
        written.append(save(seen.relations(min_weight), made / "relations.csv"))
    if keys:
        written.append(save(seen.key_table(), made / "keys.csv"))
    if seen.rollout is not None:
        written += [save(seen.rollout.table(top_k, min_weight), made / "rollout.csv"), save_rollout(seen, made, style)]
    if figures:
        names = [head.name for head in seen.kept_heads(sort)[:MOST_HEADS]] if heads is None else heads
        written += Drawing.of(seen, names).draw(made, figures, style, workers, advance)
    files = sorted(path.relative_to(made).as_posix() for path in written)
    return [*written, save_json(manifest(seen, options or {}, files), made / "manifest.json")]


def writable(folder: Path) -> Path:
    """The folder, made if need be. Raises UsageError where it cannot hold files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}", "name another folder") from error
    return folder


def manifest(seen: Observation, options: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """What made an export: model, engine, versions, text, options, what was checked; enough to repeat the run.

    row_sum_error, masked_weight and value_error are the largest over all calls; null where they were not measured.
    """
    calls = seen.report.calls
    return {
        "schema": SCHEMA,
        **seen.facts,
        "versions": versions(),
        "text": {"sha256": seen.prompt.sha256, "tokens": len(seen.prompt), "removed_tokens": seen.prompt.removed},
        "options": dict(options),
        "checks": {
            "row_sum_error": _largest([check.row_sum_error for check in calls]),
            "masked_weight": _largest([check.masked_weight for check in calls]),
            "value_error": _largest([check.value_error for check in calls]),
            "sink_logits": any(check.sink_logits for check in calls),
            "failures": seen.failures,
            "unmeasured": seen.unmeasured,
        },
        "calls": [
            {
                "layer": check.layer,
                "call": check.call,
                "module": check.path,
                "heads": check.heads,
                "route": check.route,
                "mask": check.mask,
                "kernel": check.kernel,
            }
            | ({"altered": True} if check.altered else {})
            for check in calls
        ],
        "files": list(files),
    }


def _largest(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return max(measured) if measured else None
