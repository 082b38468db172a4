"""What an atlas calls the heads of a model: its names and facts, read from the folder that `attnscope scan` filled.

names = names_of(Path("runs/atlas"))
names.roles[3, 0]           # ("induction", "sink")
names.named("induction")    # {3: (0, 1)}
atlas_of(loaded)            # what lies in atlas/ of the model's own folder, if it is of these weights
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from attnscope.errors import InputError, UsageError
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.selection import DECODER, LINEAR, StackLayer, is_linear
from attnscope.utils.display import head_name
from attnscope.utils.files import (
    LONGEST_TEXT,
    FileState,
    check_schema,
    check_types,
    damaged,
    read_json,
    read_small,
    state_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "atlas/3"
NAME, TABLE = "atlas.json", "atlas.parquet"
BESIDE = "atlas"  # the folder in a model's own that holds its atlas
MOST_ROWS = 1 << 19  # heads times contrasts: a model of 5,120 heads has 180,000
COLUMNS = ("score", "null", "effect", "low", "high", "low_all", "high_all", "p", "p_symmetric", "t", "n")
OFFSETS = {0: "self", 1: "previous-token", 2: "offset-2", 3: "offset-3", 4: "offset-4"}
ROLES = ("induction", "prefix-matching", *OFFSETS.values(), "duplicate-token", "sink", "long-range-copying")

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """What tells one model's weights from another's: its name, the commit of a Hub model, where its files lie."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def source_folder(self) -> Path | None: ...
    @property
    def base_folder(self) -> Path | None: ...


@dataclass(frozen=True)
class HeadNames:
    """What an atlas calls the heads of a model: roles by (layer, head), every head's; facts: what it says of itself."""

    roles: Mapping[tuple[int, int], tuple[str, ...]]
    facts: Mapping[str, Any]

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Every head of the model as (layer, head), in order."""
        return tuple(self.roles)

    def named(self, role: str) -> dict[int, tuple[int, ...]]:
        """{layer: heads} that have a role; empty where none has."""
        heads: dict[int, tuple[int, ...]] = {}
        for (layer, head), roles in self.roles.items():
            if role in roles:
                heads[layer] = (*heads.get(layer, ()), head)
        return heads

    def by_role(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """{role: {layer: heads}} as `selection.select` takes it."""
        return {role: self.named(role) for role in ROLES}

    def read(self) -> HeadNames:
        """Itself: as that of `NamesBeside`, which is read when a name is wanted."""
        return self

    def fits(self, model: Weights) -> bool | None:
        """Whether this is the atlas of a model's weights; None where neither the commit nor the files tell."""
        return _fits(self.facts, model)


Names = TypeVar("Names", bound=HeadNames)


def names_of(folder: Path) -> HeadNames:
    """What the atlas of a folder calls the heads. Raises InputError for a folder that no scan has filled."""
    with damage(folder):
        return read_atlas(folder)[0]


def read_atlas(folder: Path) -> tuple[HeadNames, Mapping[str, list[Any]]]:
    """What the atlas of a folder calls the heads, and the columns of its table, with each contrast's heads as rows.

    Raises ValueError for a damaged table, InputError for damaged facts, and for those of another version.
    """
    import pyarrow as pa

    schema = pa.schema(
        {
            **dict.fromkeys(("layer", "head"), pa.int32()),
            **dict.fromkeys(("probe", "against", "stack"), pa.string()),
            **{name: pa.int32() if name == "n" else pa.float64() for name in COLUMNS},
        }
    )
    facts, columns = _facts_of(folder), columns_of(folder / TABLE, schema)
    stacks = columns.get("stack") or [DECODER] * len(columns["layer"])
    if not {*stacks} <= {DECODER, LINEAR}:
        raise ValueError("a head is of another stack")
    layers = [
        StackLayer(layer, stack) if is_linear(stack) else layer
        for layer, stack in zip(columns["layer"], stacks, strict=True)
    ]
    places = list(zip(layers, columns["head"], strict=True))
    heads = dict.fromkeys(places)
    if places != [*heads] * (len(places) // len(heads)):
        raise ValueError("a contrast lacks heads")
    roles = {head: _words(facts["roles"].get(head_name(*head), [])) for head in heads}
    return HeadNames(roles, {name: fact for name, fact in facts.items() if name not in ("roles", "rules")}), columns


def _facts_of(folder: Path) -> dict[str, Any]:
    """What atlas.json says. Raises InputError for a damaged one, and for one of another version."""
    with damage(folder):
        facts: dict[str, Any] = read_json(folder / NAME)
        check_schema(facts, SCHEMA, folder, "scan the model again", InputError)
        check_types(facts, {"model": {"name": str, "revision": (str, NoneType)}, "roles": dict})
    return facts


def damage(folder: Path) -> AbstractContextManager[None]:
    """What is raised over the files of an atlas is an InputError that names the folder."""
    return damaged(f"{folder} holds no whole atlas", "make one: attnscope scan MODEL --out DIR")


def columns_of(path: Path, schema: pa.Schema, lists: str = "") -> Mapping[str, list[Any]]:
    """The columns of a study's table, those of the schema that it has; None for null and NaN.

    lists: the column whose texts may have any length. Raises OSError as `read_small`, ValueError as `read_columns`, and
    for more rows, or longer names, than any has.
    """
    import pyarrow as pa

    from attnscope.utils.parquet import read_columns
    from attnscope.utils.tables import python_values

    table = read_columns(pa.BufferReader(read_small(path)), schema, MOST_ROWS)
    columns = {name: [*chain.from_iterable(map(python_values, table[name].chunks))] for name in table.column_names}
    for name, values in columns.items():
        if name != lists and any(len(value) > LONGEST_TEXT for value in set(values) if isinstance(value, str)):
            raise ValueError(f"{name} holds a long text")
    return columns


def _words(roles: Any) -> tuple[str, ...]:
    """The roles of a head, a word each. Raises ValueError for what is no list of words."""
    if not isinstance(roles, list) or not all(
        isinstance(role, str) and role.isprintable() and role.split() == [role] for role in roles
    ):
        raise ValueError(f"{roles!r} are not roles")
    return tuple(roles)


@overload
def atlas_of(model: Weights, atlas: HeadNames | Path | str | None = None) -> HeadNames | None: ...
@overload
def atlas_of(model: Weights, atlas: Names | Path | str | None, read: Callable[[Path], Names]) -> Names | None: ...
def atlas_of(
    model: Weights, atlas: HeadNames | Path | str | None = None, read: Callable[[Path], HeadNames] = names_of
) -> HeadNames | None:
    """The atlas that was asked for, or the one in atlas/ of the model's own folder; None where there is none.

    read: reads a folder. Raises InputError for a folder without an atlas, UsageError for an atlas of other weights.
    What is in the folder and is not an atlas of the model is ignored, with a warning.
    """
    if atlas is None:
        return _beside(model, read)
    named = read(Path(atlas)) if isinstance(atlas, str | Path) else atlas
    fits, of = named.fits(model), named.facts["model"]["name"]
    if fits is False:
        raise UsageError(
            f"the atlas is of {of}, which has other weights than {model.name}",
            f"scan this model: attnscope scan {model.name} --out DIR",
        )
    if fits is None:
        logger.warning("cannot tell whether the atlas of %s was made with the weights of %s", of, model.name)
    return named


def _beside(model: Weights, read: Callable[[Path], HeadNames]) -> HeadNames | None:
    folder = model.source_folder / BESIDE if model.source_folder else None
    if folder is None or not (folder / NAME).exists():
        return None
    states = tuple(state_of(path) for path in (folder / NAME, folder / TABLE) if path.exists())
    try:
        if _fits(_read_once(folder, states, _facts_of), model):  # before the table is read: it may be of another
            return _read_once(folder, states, read)
    except InputError as error:
        logger.warning("%s", error)
        return None
    logger.warning("%s is ignored: it was not made with these weights", folder)
    return None


def _fits(facts: Mapping[str, Any], model: Weights) -> bool | None:
    """As `HeadNames.fits`, by what its atlas.json says."""
    scanned = facts["model"]
    if model.revision and (scanned["name"], scanned["revision"]) == (model.name, model.revision):
        return True
    before, now = scanned.get("weights_sha256"), weights_sha256(model.source_folder, model.base_folder)
    return before == now if before and now else None


@lru_cache(maxsize=16)
def _read_once(folder: Path, states: tuple[FileState, ...], read: Callable[[Path], Any]) -> Any:
    """What is read of a folder, once for many texts; again where the states of its files are others."""
    return read(folder)


def roles_by_head(roles: Mapping[tuple[int, int], Sequence[str]]) -> dict[str, list[str]]:
    """{"L3H0": ["induction", "sink"]}: the heads that have a role."""
    return {head_name(*head): list(names) for head, names in roles.items() if names}
