"""The folder of a run -> an observation of what its tables hold, for another page or other pictures.

    seen = run_of_folder(Path("runs/bank"))          # of every stack; `view --from-tables`
    seen = kept_run(Path("runs/bank"))               # of one stack, with maps to draw; `draw FOLDER`
    drawings(seen)[""].draw(Path("pictures"), style=Style(cmap="magma"))

No model is loaded. Scores are those of heads.csv, weights those of relations.csv. What the tables do not hold (what
uniform attention scores, how many rows a metric was measured on) is not drawn.

Tables are what somebody wrote: a cell that is no number, a head, query or key that is not there, is refused.

A finished scan, ablation or comparison is drawn again from its folder too, with other looks:

    redraw_study(Path("runs/atlas"), Path("pictures"), Style(cmap="magma"))   # probes.png, head_js.png

Shapes: N head, Q query, K key, k kept key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.errors import InputError, UsageError, visible
from attnscope.export.manifest import NAME, TARGET, prompt_of, read_manifest
from attnscope.figures import About, Style
from attnscope.hooks.report import CaptureReport
from attnscope.metrics.metrics import KNOWN
from attnscope.metrics.roles import NONE
from attnscope.metrics.texts import MAP_SIDE, Cells
from attnscope.model.selection import DECODER, MIXING, OF_TWO_TEXTS, STACKS, is_cross, looks_back, mixes, sides
from attnscope.observe.atlas import columns_of
from attnscope.observe.observation import Observation
from attnscope.observe.records import HeadColumns, KeptKeys, LayerMaps, Matrices, Score
from attnscope.observe.request import NOT_KNOWN, LayerKey, PerLayer, View
from attnscope.studies import ablation as effects
from attnscope.studies import atlas
from attnscope.studies.comparison import NAME as COMPARISON
from attnscope.utils.files import damaged, open_native
from attnscope.utils.memory import check_free
from attnscope.utils.tables import read_delimited

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt

Place = tuple[LayerKey, int]  # a layer and a head of it
MOST = 1 << 12  # heads of a layer: a number beyond is no head
ENOUGH = 1 << 30  # rows of a text, where nothing says how many there are
LISTED_BYTES = 32  # of a weight and its key, while they are laid out
AGAIN = "read the text again: attnscope draw --from {}"


def run_of_folder(folder: Path, otherwise: str = "leave out {from_tables}") -> Observation:
    """What the tables of a run hold, the decoder's or the only stack's; the others are its `other_stacks`.

    Kept are the keys that relations.csv lists, and whole weights where it lists all of them. otherwise: the hint of
    refusals. Raises UsageError for a folder that is damaged, and for one of means over kv heads; MemoryLimitError where
    there is no room for what is listed.
    """
    tables = RunTables(folder, otherwise)
    stacks = list(dict.fromkeys(key.stack for key, _ in tables.places)) if tables.target is None else OF_TWO_TEXTS
    of_stack = {
        stack: _observation(
            tables,
            [place for place in tables.places if place[0].stack == stack],
            *sides(stack, tables.source, tables.target or tables.source),
        )
        for stack in stacks
    }
    return replace(of_stack.pop(DECODER if DECODER in of_stack else stacks[0]), other_stacks=of_stack)


def load_run(folder: Path, *, sink_apart: bool = False) -> Observation:
    """The run of a folder as it is drawn; its maps are None where relations.csv does not list every weight.

    sink_apart: whether key 0 of a long text keeps a column of its own. Raises UsageError as `run_of_folder`, and for a
    run of several stacks.
    """
    again = AGAIN.format(folder)
    seen = run_of_folder(folder, again)
    if any(not mixes(stack) for stack in seen.other_stacks):
        raise UsageError(f"{folder} is a run of several stacks", again)
    others = {stack: _with_maps(obs, sink_apart) for stack, obs in seen.other_stacks.items()}
    return replace(_with_maps(seen, sink_apart), other_stacks=others)


def _with_maps(seen: Observation, sink_apart: bool) -> Observation:
    """One stack with the maps that its weights are, and nothing else that was kept."""
    from attnscope.export.drawing import coarser

    kept = seen.kept.get("weights")
    if not kept:
        return replace(seen, kept={})
    # a query sees no key after it where the stack is causal: those cells are empty in the picture, and not 0
    count = len(seen.queries)
    hidden_TT = np.triu(np.ones((count, count), bool), 1) & looks_back(seen.stack)
    values = {
        key: np.where(hidden_TT, np.float32(np.nan), np.asarray(matrices.weights)) for key, matrices in kept.items()
    }
    cells = Cells.of(range(count), count)
    heads = PerLayer({key: matrices.heads for key, matrices in kept.items()})
    maps = coarser(LayerMaps(PerLayer(values), heads, cells, cells, "sum"), MAP_SIDE, sink_apart)
    return replace(seen, kept={"maps": maps})


class RunTables:
    """heads.csv and relations.csv of a folder, and what its manifest says.

    Raises UsageError for what is damaged, and for a run without tables of the heads of a text.
    """

    def __init__(self, folder: Path, otherwise: str) -> None:
        self.folder, self.otherwise = folder, otherwise
        self.manifest = read_manifest(folder / NAME)
        self.source = prompt_of(self.manifest, folder / NAME)
        self.target = prompt_of(self.manifest, folder / NAME, TARGET) if TARGET in self.manifest else None
        if self.of_run("options").get("by"):
            raise UsageError(f"{folder} is of means over kv heads", otherwise)
        self.heads, self.relations = self._table("heads.csv"), self._table("relations.csv")
        if not self.places:
            raise UsageError(f"{folder} has no table of heads or relations", otherwise)
        crossed = self.of_run("target") or any(is_cross(key.stack) for key, _ in self.places)
        if self.target is None and crossed:
            raise UsageError(f"{folder} does not say which tokens its target has", otherwise)
        if max(head for _, head in self.places) >= MOST:
            raise UsageError(f"{folder} names heads that no model has", "name the folder of a finished run")

    def of_run(self, name: str) -> Mapping[str, Any]:
        """A part of the manifest; empty where it is none."""
        part = self.manifest.get(name)
        return part if isinstance(part, Mapping) else {}

    def lengths(self, stack: str) -> tuple[int, int]:
        """How many queries and keys a stack has."""
        return sides(stack, len(self.source), len(self.target or self.source))

    @property
    def channel(self) -> int | None:
        """The channel whose maps the run shows, of layers whose channels have maps of their own."""
        asked: Any = self.of_run("ask")
        for name in ("keep", "view", "channel"):
            asked = asked.get(name) if isinstance(asked, Mapping) else None
        return asked if type(asked) is int and asked >= 0 else None

    @cached_property
    def places(self) -> list[Place]:
        """The heads of the tables, in the model's order."""
        places = {place for table in self._tables for place in _places_of(table)}
        return sorted(places, key=lambda place: (STACKS.index(place[0].stack), place[0].layer, place[1]))

    @cached_property
    def rows(self) -> Mapping[Place, Mapping[str, Any]]:
        """The row of heads.csv of every head that has one."""
        return {} if self.heads is None else dict(zip(_places_of(self.heads), self.heads.to_pylist(), strict=True))

    @cached_property
    def kv_heads(self) -> Mapping[Place, int]:
        """The kv head that each head reads."""
        numbers = [zip(_places_of(table), table["kv_head"].to_pylist(), strict=True) for table in self._tables]
        return dict(chain.from_iterable(numbers))

    @cached_property
    def listed(self) -> Mapping[LayerKey, KeptKeys]:
        """The keys of every query, as listed; {} where relations are of words, or not there.

        Raises MemoryLimitError where there is no room for all: few rows may name heads and tokens that are far apart.
        """
        table, grouped = self.relations, self.of_run("export").get("group")
        if table is None or "weight" not in table.column_names or grouped:
            return {}
        number = {place: at for at, place in enumerate(self.places)}
        places = _places_of(table)
        most_N2 = np.array([self.lengths(key.stack) for key, _ in places], np.int64).reshape(-1, 2)
        query, key = (table[name].to_numpy() for name in ("query", "key"))
        if (query >= most_N2[:, 0]).any() or (key >= most_N2[:, 1]).any():
            raise self.damaged("relations.csv")
        # rows may come in any order, and a query may have fewer keys than another: its nth row is its nth key
        queries, keys = (max(of) for of in zip(*(self.lengths(key.stack) for key, _ in self.places), strict=True))
        row = np.array([number[place] for place in places], np.int64) * queries + query
        order = np.argsort(row, kind="stable")
        row, key, weight = row[order], key[order], table["weight"].to_numpy()[order]
        nth = np.arange(len(row)) - np.searchsorted(row, row)
        most = int(nth.max(initial=0)) + 1
        if most > keys:
            raise self.damaged("relations.csv")
        # the size comes from numbers that somebody wrote: it is checked before the arrays are made
        takes, needed = f"{most} keys of {queries} tokens and {len(number)} heads take", len(number) * queries * most
        check_free(takes, needed * LISTED_BYTES, "name fewer heads with {select} where the run is exported")
        weights, listed = (np.full((len(number) * queries, most), none) for none in (np.float32(np.nan), np.int64(0)))
        signed = np.array([mixes(key.stack) for key, _ in places])[order]
        weights[row, nth] = np.where(np.isfinite(weight) & (signed | (weight >= 0)), weight, np.nan)
        listed[row, nth] = key
        arrays: list[Any] = [part.reshape(len(number), queries, -1) for part in (weights, listed)]
        # heads of a table alone, which list no key, have rows too: a page counts them
        kept = {}
        for layer, of_layer in groupby(self.places, key=lambda place: place[0]):
            heads = [head for _, head in of_layer]
            count, first = self.lengths(layer.stack)[0], number[layer, heads[0]]
            weight_HQk, key_HQk = (array[first : first + len(heads), :count] for array in arrays)
            kept[layer] = KeptKeys(heads, weight_HQk, key_HQk, range(count))
        return kept

    @cached_property
    def whole(self) -> bool:
        """Whether every weight is listed: of every query of every head one of each key that it sees."""
        listed, visible = sum(np.count_nonzero(~np.isnan(keys.weight)) for keys in self.listed.values()), 0
        for layer, _ in self.places:
            queries, keys = self.lengths(layer.stack)
            visible += queries * (queries + 1) // 2 if looks_back(layer.stack) else queries * keys
        return bool(self.listed) and listed == visible

    def roles(self, place: Place) -> tuple[str, str, str | None]:
        """What a head is called, its role on the text, and all that an atlas names it; None without an atlas.

        Until run/4 the column `role` was the text's.
        """
        row = self.rows.get(place, {})
        text_role = _unquoted(row.get("text_role" if "text_role" in row else "role")) or NONE
        if self.heads is None or not self.of_run("atlas"):
            return text_role, text_role, None
        names = _unquoted(row.get("atlas_roles")).split()
        return next(iter(names), NONE), text_role, " ".join(names)

    def damaged(self, name: str) -> UsageError:
        """The refusal of a table."""
        return UsageError(f"{self.folder / name} is damaged, or of another kind", self.otherwise)

    @property
    def _tables(self) -> list[pa.Table]:
        return [table for table in (self.heads, self.relations) if table is not None]

    def _table(self, name: str) -> pa.Table | None:
        """A table of the folder, its numbers as numbers; only rows of heads."""
        import pyarrow as pa

        path = self.folder / name
        if not path.is_file():
            return None
        whole, real = ("layer", "head", "kv_head", "query", "key", "top_key"), ("weight", "top_key_mass", *KNOWN)
        dtypes = {**dict.fromkeys(whole, pa.int32()), **dict.fromkeys(real, pa.float32()), "near_uniform": pa.bool_()}
        needed = {"layer", "head", "kv_head"} | ({"query", "key"} if name == "relations.csv" else set())
        try:
            with open_native(path) as source:
                table = read_delimited(source, dtypes, multiline=True)
            columns = table.column_names
            if len(set(columns)) < len(columns) or not {*needed, "stack"} <= set(columns):
                raise self.damaged(name)
            stacks = table["stack"].to_pylist()
            if not set(stacks) <= set(STACKS):
                raise self.damaged(name)
            # a layer without attention has a type, and no head
            types = table["type"].to_pylist() if "type" in columns else [None] * len(table)
            kept = [stack in (*OF_TWO_TEXTS, *MIXING) and not what for stack, what in zip(stacks, types, strict=True)]
            table = table.filter(pa.array(kept, pa.bool_()))
            kv_heads = table["kv_head"]
            if kv_heads.null_count == len(table):  # of weights alone, which do not tell
                table = table.set_column(columns.index("kv_head"), "kv_head", pa.array([NOT_KNOWN] * len(table)))
                needed.remove("kv_head")
            if any(table[column].null_count or (table[column].to_numpy() < 0).any() for column in needed):
                raise self.damaged(name)
        except (pa.ArrowException, OSError, ValueError):
            raise self.damaged(name) from None
        return table


def _observation(tables: RunTables, places: Sequence[Place], queries: Prompt, keys: Prompt) -> Observation:
    """The heads of some places as they are in the tables."""
    # a table does not say how many heads a layer has: as many as the last one listed needs
    counts: dict[LayerKey, int] = defaultdict(int)
    kv_counts: dict[LayerKey, int] = defaultdict(int)
    for place in places:
        counts[place[0]] = max(counts[place[0]], place[1] + 1)
        kv_counts[place[0]] = max(kv_counts[place[0]], tables.kv_heads[place] + 1)
    listed = {key: kept for key, kept in tables.listed.items() if key in counts}
    weights = {key: _whole(kept, len(keys)) for key, kept in listed.items()} if tables.whole else {}
    # what a manifest says of its model goes into pages: texts and numbers, whatever was written there
    model = tables.of_run("model")
    facts = {name: model.get(name) for name in ("type", "revision", "layers")}
    facts = {name: fact if fact is None or isinstance(fact, int) else str(fact) for name, fact in facts.items()}
    return Observation(
        queries=queries,
        keys=keys,
        text_columns=_columns(tables, counts, len(keys)),
        view=View(channel=tables.channel),
        group=None,
        support=PerLayer({key: defaultdict(lambda: ENOUGH) for key in counts}),
        visible=PerLayer(dict.fromkeys(counts, "-")),
        received=np.zeros(len(keys)),
        report=CaptureReport(),
        kv_of=PerLayer({key: (count, kv_counts[key]) for key, count in counts.items()}),
        facts={
            "model": {"name": str(model.get("name")), **facts},
            **{name: str(tables.manifest.get(name)) for name in ("dtype", "engine")},
        },
        kept={
            **({"weights": PerLayer(weights)} if weights else {}),
            **({"relations": PerLayer(listed)} if listed else {}),
        },
    )


def _whole(listed: KeptKeys, keys: int) -> Matrices:
    """The matrices of a layer with every weight listed; 0 for keys that a query does not see."""
    weight_HQk, key_HQk = np.asarray(listed.weight), np.asarray(listed.key)
    weights_HQK: Any = np.zeros((*weight_HQk.shape[:2], keys), np.float32)
    head, query, nth = np.nonzero(~np.isnan(weight_HQk))
    weights_HQK[head, query, key_HQk[head, query, nth]] = weight_HQk[head, query, nth]
    return Matrices(listed.heads, weights_HQK)


def _columns(tables: RunTables, counts: Mapping[LayerKey, int], keys: int) -> HeadColumns:
    """The heads of every layer up to the last that is listed; those that are listed are kept."""
    places: list[Place] = [(key, head) for key, count in counts.items() for head in range(count)]
    rows = [tables.rows.get(place, {}) for place in places]
    ids = [name for name in KNOWN if tables.heads is not None and name in tables.heads.column_names]
    none_N, zero_N = np.full(len(places), np.nan), np.zeros(len(places), np.int64)
    # -1 for no top key, as where the queries that were asked about see none
    top_key_N = np.array([-1 if row.get("top_key") is None else row["top_key"] for row in rows], np.int64)
    if not all(0 <= row.get("top_key", 0) < keys for row in rows if row.get("top_key") is not None):
        raise tables.damaged("heads.csv")
    # what is in no table is NaN: a page and a picture leave it out
    roles_N3 = np.array([tables.roles(place) for place in places], object).reshape(-1, 3)
    return HeadColumns(
        layer=np.array([key.layer for key, _ in places], np.int64),
        stack=np.array([key.stack for key, _ in places], object),
        head=np.array([head for _, head in places], np.int64),
        kv_head=np.array([tables.kv_heads.get(place, 0) for place in places], np.int64),
        role=roles_N3[:, 0],
        text_role=roles_N3[:, 1],
        atlas_roles=roles_N3[:, 2],
        near_uniform=np.array([row.get("near_uniform") for row in rows], object),
        scores={name: Score(_numbers(rows, name), none_N) for name in ids},
        top_key=top_key_N,
        top_key_mass=np.where(top_key_N < 0, np.nan, _numbers(rows, "top_key_mass")),
        relation_weight=none_N,
        relation_query=zero_N,
        relation_key=zero_N,
        kept=np.array([place in tables.kv_heads for place in places], bool),
    )


def _numbers(rows: Sequence[Mapping[str, object]], name: str) -> np.ndarray:
    return np.array([row.get(name) for row in rows], np.float64)


def _unquoted(cell: object) -> str:
    """A cell of text, also of a table for spreadsheets."""
    return str(cell or "").removeprefix("'")


def _places_of(table: pa.Table) -> list[Place]:
    """The head of each row."""
    layers = map(LayerKey, table["layer"].to_pylist(), table["stack"].to_pylist())
    return list(zip(layers, table["head"].to_pylist(), strict=True))


LONGEST_NAME = 80
CHECKPOINTS = "checkpoints.parquet"
STUDIES = (atlas.NAME, CHECKPOINTS, effects.NAME, COMPARISON)  # the file by which the folder of each is known


class Redrawn(NamedTuple):
    """The pictures that were drawn, and in words which of a folder's could not be."""

    paths: list[Path]
    notes: tuple[str, ...] = ()


def redraw_study(folder: Path, into: Path, style: Style = Style()) -> Redrawn | None:
    """Draw the pictures of a study from its folder into another; None for a folder that holds none.

    Raises InputError for a folder with damaged or missing tables.
    """
    kind = next((name for name in STUDIES if (folder / name).exists()), None)
    if kind is None:
        return None
    from attnscope.export import study_figures as pictures
    from attnscope.studies.comparison import load_comparison
    from attnscope.studies.head_distances import load_texts

    # Heads are counted before they are drawn: a damaged table may name a million.
    if kind == atlas.NAME:
        scan = atlas.load_atlas(folder)
        name = _name(scan.facts)
        _check(folder, scan.heads)
        paths = [pictures.save_probes(scan, into, name, style)]
        texts = load_texts(folder)
        if texts is not None:
            _check(folder, texts.heads)
            path = into / f"{pictures.HEAD_JS}.{style.image}"
            paths.append(pictures.save_head_js(texts, scan, path, style.of_model(name)))
        return Redrawn(paths)
    if kind == CHECKPOINTS:
        with damaged(f"{folder} holds no whole scans", "make them: attnscope scan MODEL --out DIR"):
            columns = columns_of(folder / CHECKPOINTS, pa.schema([("revision", pa.string())]))
            revisions = list(dict.fromkeys(map(str, columns["revision"])))
        atlases = {visible(name): atlas.load_atlas(pictures.folder_of(folder, name)) for name in revisions}
        for scan in atlases.values():
            _check(folder, scan.heads)
        name = _name(next(iter(atlases.values())).facts)
        return Redrawn([pictures.draw_checkpoints(atlases, into, name, style)])
    if kind == effects.NAME:
        ablation = effects.load_ablation(folder)
        heads = sorted({head for heads in ablation.effects for head in heads})
        _check(folder, heads)
        # Costs are of the table alone, since the runs that they are the mean of are not kept.
        with damaged(f"{folder} holds no whole ablation", effects.AGAIN):
            costs = pictures.costs_of(columns_of(folder / effects.TABLE, effects.STORED, lists="heads"))
            if not all(isfinite(cost.value) for cost in costs):
                raise ValueError("an effect is no number")
        note = "heads in no set, and scores of an atlas, are not drawn: they are not in the tables; ablate again"
        return Redrawn(pictures.save_ablation(ablation, into, heads, style=style, costs=costs), (note,))
    # Of a comparison the weights of both sides are not kept, so that its maps cannot be drawn.
    comparison, of_texts = load_comparison(folder)
    _check(folder, comparison.heads)
    about = About(line=visible(of_texts), command=style.about.command)
    paths = list(pictures.save_differences(comparison, into, style.of(about)))
    return Redrawn(paths, ("layers/ is not drawn: no table holds the weights of both sides; compare again",))


def _name(facts: Mapping[str, Any]) -> str:
    """The model's name as a picture says it."""
    return visible(str(facts["model"]["name"]))[:LONGEST_NAME]


def _check(folder: Path, heads: Iterable[tuple[int, int]]) -> None:
    """Raise InputError for heads that no model has: pictures have a row per layer, and a column per head."""
    if not all(type(place) is int and 0 <= place < MOST for head in heads for place in head):
        raise InputError(f"{folder} names heads that no model has", "name the folder of a finished study")
