"""An observation as figures take it: maps with labels, panels of scores, what they are of, pictures in memory.

Shapes: L layer, H head, Q query, K key, G unit of a rollout.
"""

from __future__ import annotations

import html
import math
from base64 import b64encode
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

import numpy as np

from attnscope import figures
from attnscope.errors import UsageError, visible
from attnscope.figures import About, Depth, Maps, Panel, Part, Patches, PatchSheet, Style
from attnscope.figures.drawing_process import DrawingProcess, take_process, worker_count
from attnscope.figures.style import Quantity, StyleFields, layer_name
from attnscope.metrics.metrics import COLUMNS, KNOWN, MASS, ends, order_of
from attnscope.metrics.roles import NEEDED_ROWS, NONE, OTHER, ROLE_METRICS, roles_for
from attnscope.model.selection import (
    CHANNELS,
    DIFFERENCE,
    GLOBAL,
    LINEAR,
    POOLING,
    is_bidirectional,
    is_linear,
    mixes,
    prefix,
)
from attnscope.observe.request import LayerKey, PerLayer
from attnscope.utils.display import decimals_of, head_name, model_name, number_of, printed, shortened
from attnscope.utils.files import write_whole

if TYPE_CHECKING:
    from attnscope.figures.terminal import HeadMaps
    from attnscope.inputs.prompt import Prompt, Span
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import HeadColumns, LayerMaps

FIRST = ("mass", "focus", "previous_token", "induction", "duplicate_token", "sink", "entropy")  # of the metrics' panels
LONGEST_NAME = 40  # letters of a model's name, and of an expression
MOST_UNIFORM = 3  # kinds of layer whose uniform value is marked
MOST_OVER = 7  # heads over a picture, which is drawn beside them
FRAMED = 5  # heads of the picture of their mass
NOTHING = 0.005  # of the weight: printed as 0.00
Numbers = Sequence[float] | np.ndarray


def score_panels(seen: Observation, metrics: Sequence[str] = ()) -> tuple[tuple[int, ...], tuple[Panel, ...]]:
    """The layers with a kept head, and a panel per metric, (L, H) of the kept heads, NaN elsewhere.

    metrics: those that are drawn, in this order; all without them. Each is on its metric's whole range, with what
    uniform attention scores and from how many rows it was measured.
    """
    columns, order = seen.columns, np.flatnonzero(seen.columns.kept)
    layers, panels = np.unique(columns.layer[order]).tolist(), []
    every = sorted(columns.scores, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    names = [name for name in metrics if name in columns.scores] or every
    for name in names if layers else ():
        metric, score = KNOWN[name], columns.scores[name]
        values, null = _by_layer(seen, score.value), score.null[order]
        # A layer in which the text has fewer rows than a role needs is hatched.
        role = next((row for row in roles_for(seen.stack) if row.metric == name), None)
        kind, needed = (role.rows, role.needed) if role else (metric.rows, NEEDED_ROWS)
        rows = [seen.support[layer][kind] for layer in layers]
        finite = values[np.isfinite(values)]  # for a metric with an open range: the least and the largest of its values
        measured = (float(finite.min()), float(finite.max())) if finite.size and np.ptp(finite) else (0.0, 1.0)
        low, high = ends(metric, len(seen.prompt)) or measured
        uniform = np.unique(null[np.isfinite(null)].round(2))
        panel = Panel(
            name=metric.title,
            values_LH=values,
            low=low,
            high=high,
            unit=metric.unit,
            uniform=tuple(uniform.tolist()) if len(uniform) <= MOST_UNIFORM else (),
            few_L=tuple(there < needed for there in rows),
            always=bool(metrics),
            support=f"{number_of(min(rows), 'row')}, {needed} needed" if min(rows) < needed else "",
        )
        panels.append(panel)
    return tuple(layers), tuple(panels)


def depths_of(seen: Observation, names: Sequence[str], sort: str | None) -> tuple[tuple[Depth, ...], str]:
    """Metrics of the kept heads over the layers, and a note; without names that by which heads are sorted.

    Those that were not measured are left out.
    """
    columns, kept = seen.columns, np.flatnonzero(seen.columns.kept)
    first = order_of(sort)[0] if sort else ""
    names = names or [first if first in columns.scores else seen.ranked_by or ""]
    scores = {name: columns.scores[name] for name in names if name in columns.scores}
    depths = tuple(
        Depth(KNOWN[name].title, KNOWN[name].unit, columns.layer[kept], score.value[kept], score.null[kept])
        for name, score in scores.items()
        if np.isfinite(score.value[kept]).any()
    )
    return depths, chosen_words(seen)


def with_rows(
    layers: Sequence[int], panels: Sequence[Panel], without: Mapping[int, str]
) -> tuple[tuple[int, ...], tuple[Panel, ...]]:
    """The layers and panels with a grey row for each layer without attention; without: {layer: what it is}."""
    if not without or not panels:
        return tuple(layers), tuple(panels)
    every = sorted({*layers, *without})
    row_of, names = [every.index(layer) for layer in layers], tuple(without.get(layer, "") for layer in every)
    spread = []
    for panel in panels:
        values_LH, few_L = np.full((len(every), panel.values_LH.shape[1]), np.nan), np.zeros(len(every), bool)
        values_LH[row_of], few_L[row_of] = panel.values_LH, panel.few_L or False
        first = tuple((row_of[row], head) for row, head in panel.first)
        spread.append(replace(panel, values_LH=values_LH, few_L=tuple(few_L.tolist()), first=first, without_L=names))
    return tuple(every), tuple(spread)


def _by_layer(seen: Observation, values: np.ndarray) -> np.ndarray:
    """A value of all heads as (L, H) of the kept ones, NaN elsewhere."""
    columns, order = seen.columns, np.flatnonzero(seen.columns.kept)
    number = np.where(columns.head[order] < 0, columns.kv_head[order], columns.head[order])
    return layers_by_heads(columns.layer[order], number, values[order])


def layers_by_heads(layer_N: Numbers, head_N: Numbers, value_N: Numbers) -> np.ndarray:
    """A number of each head as (L, H) of the layers that have heads, NaN elsewhere."""
    row_N = np.unique(layer_N, return_inverse=True)[1]
    values_LH = np.full((row_N.max() + 1, int(np.max(head_N)) + 1), np.nan)
    values_LH[row_N, np.asarray(head_N)] = value_N
    return values_LH


def mass_panels(seen: Observation) -> tuple[tuple[Panel, ...], str]:
    """The mass on the named keys, and, where uniform attention differs from head to head, how far it is above it.

    With a note: which tokens, and the heads furthest above uniform attention, which are framed. Nothing without keys.
    """
    mass, order = seen.columns.scores.get(MASS.id), np.flatnonzero(seen.columns.kept)
    if mass is None or not np.isfinite(mass.value[order]).any():
        return (), ""
    # the heads furthest above uniform attention are framed: in a short text every head gives much
    layers, above = np.unique(seen.columns.layer[order]).tolist(), mass.value - mass.null
    best = [head for head in seen.kept_heads(MASS.id)[:FRAMED] if math.isfinite(head.score[MASS.id])]
    first = tuple((layers.index(head.layer), head.number) for head in best)
    high, uniform = float(np.nanmax(mass.value[order])) or 1.0, np.unique(mass.null[order].round(3))
    uniform = uniform[np.isfinite(uniform)]
    # the whole range only where it is nearly reached: small masses would all have the colour of 0
    panels = [
        Panel(
            name="mass",
            values_LH=_by_layer(seen, mass.value),
            low=0.0,
            high=1.0 if high >= 0.9 else high,
            unit=MASS.unit,
            uniform=tuple(uniform.tolist()) if len(uniform) <= MOST_UNIFORM else (),
            first=first,
            always=True,
        )
    ]
    if len(uniform) > 1:  # elsewhere the second picture is the first with another zero
        reach, values_LH = float(np.nanmax(abs(above[order]))), _by_layer(seen, above)
        signed: Quantity = "logit"
        panels.append(
            Panel("mass − uniform", values_LH, -reach, reach, MASS.unit, quantity=signed, first=first, always=True)
        )
    decimals = decimals_of(max([high, *uniform.tolist()]))
    named = enumerate(best, start=1)
    scores = ", ".join(f"{n} {head.name} {printed(head.score[MASS.id], decimals)}" for n, head in named)
    return tuple(panels), f"{chosen_words(seen)}\nframed, furthest above uniform attention: {scores}"


def patch_sheets(seen: Observation, names: Sequence[str]) -> tuple[PatchSheet, ...]:
    """For each picture that was given with the text, what the chosen queries' weights on its patches are drawn from.

    names: the heads, or none for those that look most at the pictures, without those that hardly look. Nothing where
    no weights per token were kept, where they are of keys alone, and where the patches' places are not known.
    """
    patches, on_keys = seen.queries.medium.patches, seen.chosen.query is None and seen.chosen.key is not None
    if not seen.per_token or on_keys or any(patch.box is None for patch in patches.values()):
        return ()
    heads = [
        (head_name(key.layer, head, seen.view.by_kv), np.asarray(weight_T))
        for key, kept in seen.per_token.items()
        for head, weight_T in zip(kept.heads, kept.weight, strict=True)
    ]
    every = np.array(list(patches), int)
    heads.sort(key=lambda head: -np.nansum(head[1][every]))
    looking = [head for head in heads[:MOST_OVER] if np.nansum(head[1][every]) >= NOTHING]
    shown = [head for head in heads if head[0] in names] or looking or heads[:1]
    most = f"; the {len(shown)} of {len(heads)} heads that look most at it"
    most *= len(shown) < len(heads) and seen.view.heads is None
    images, sheets = seen.queries.medium.images, []
    elsewhere = "on the text" if seen.queries.text else "on other tokens"
    for number, image in enumerate(images):
        at = [place for place, patch in patches.items() if patch.picture == number]
        # Of each head how much is on this picture, on the others, and elsewhere.
        drawn = []
        for name, weight_T in shown:
            here, pictures, total = (float(np.nansum(part)) for part in (weight_T[at], weight_T[every], weight_T))
            others = f", {pictures - here:.2f} on the others" * (len(images) > 1)
            mass = f"{here:.2f} on the picture{others}, {total - pictures:.2f} {elsewhere}"
            drawn.append(Patches(weight_T[at], name, mass))
        which = f"picture {number + 1} of {len(images)}" if len(images) > 1 else "the picture"
        box_N4 = np.array([patches[place].box for place in at])
        twice = float(np.prod(box_N4[:, 2:] - box_N4[:, :2], 1).sum()) > 1.5  # its tiles, and the whole in small
        each = "tokens of its parts and of the whole are added up" if twice else "a patch is a token"
        note = f"{chosen_words(seen) or 'mean over all queries'}; {each}{most}"
        sheets.append(PatchSheet(image, box_N4, tuple(drawn), f"Attention weights on {which}", note))
    return tuple(sheets)


def chosen_words(seen: Observation) -> str:
    """`queries “bank” (2 of 9), keys “Mary” (1 of 9)`, nothing where no tokens were asked about."""
    named = {"queries": (seen.chosen.query, seen.queries), "keys": (seen.chosen.key, seen.keys)}
    return visible(
        ", ".join(
            f"{side} “{shortened(match.expression, LONGEST_NAME)}” ({len(match.positions)} of {len(text)})"
            for side, (match, text) in named.items()
            if match
        )
    )


FIGURES, ASKED_FOR = ("overview", "layers", "heads", "metrics"), ("mass", "top", "depth")  # of every text; where named
DEFAULT = ("overview", "top", "heads")  # of a folder
QUANTITIES: Mapping[str, Quantity] = {"softmax": "weight", "scores": "logit", "value": "norm"}  # by what a view reads
OF_STACKS: Mapping[str, Quantity] = {  # whose maps are no weights
    DIFFERENCE: "difference",
    LINEAR: "signed",
    CHANNELS: "size",
}
ALL_HEADS = ("overview", "layers")  # which take as long to draw as the others together
WINDOWS = ("window", "chunk")  # what stands before the number, of layers that see a part of the text
LONGEST_TEXT = 60  # letters at the foot of a figure
OVER = "picture"  # where there is one beside the text
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Picture:
    """A picture in memory: shown in a notebook, or saved."""

    png: bytes
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the PNG, whole or not at all."""
        return write_whole(Path(path), lambda temp: temp.write_bytes(self.png))

    def _repr_png_(self) -> bytes:
        return self.png

    def _repr_html_(self) -> str:
        return f'<img alt="{html.escape(self.title)}" src="data:image/png;base64,{b64encode(self.png).decode()}">'

    def __repr__(self) -> str:
        return f"Picture: {self.title}, {len(self.png) // 1024} KiB of PNG"


@dataclass(frozen=True)
class DrawingOptions:
    """Which heads and metrics are drawn.

    heads: names of those drawn one by one, None for all kept. sort, top: the order of the heads on a sheet, and how
    many, None for all. depth, metrics: see `Export`.
    """

    heads: Sequence[str] | None = None
    sort: str | None = None
    top: int | None = 0
    depth: Sequence[str] = ()
    metrics: Sequence[str] = ()


@dataclass(frozen=True)
class Drawing:
    """One text's pictures before they are drawn, without torch: maps, heads to draw one by one, panels of metrics.

    layers: those of which the view keeps a head, the rows of the panels. about: what every figure is of. mass: panels
    of the mass on named keys, and their note. sheet: the first heads side by side, as those of one layer. without:
    {layer: what it is} of layers without attention, which have grey rows. within: what layers with attention
    compute in parallel. over: what is drawn over each picture that was given with the text. depth: metrics over
    layers, a note.
    """

    maps: tuple[Maps, ...]
    heads: tuple[str, ...]
    layers: tuple[int, ...]
    panels: tuple[Panel, ...]
    about: About = About()
    mass: tuple[tuple[Panel, ...], str] = ((), "")
    sheet: Maps | None = None
    without: Mapping[int, str] = field(default_factory=dict)
    within: Mapping[int, str] = field(default_factory=dict)
    over: tuple[PatchSheet, ...] = ()
    depth: tuple[tuple[Depth, ...], str] = ((), "")

    @classmethod
    def of(cls, seen: Observation, options: DrawingOptions = DrawingOptions(), stack: str = "") -> Drawing:
        """What there is to draw of one stack's observation; stack: see `Maps`."""
        heads, sort = options.heads, options.sort
        names = [stack + head.name for head in seen.kept_heads()] if heads is None else heads
        layers, panels = score_panels(seen, options.metrics)
        mass, note = mass_panels(seen)
        maps = tuple(layer_maps(seen, stack)) if seen.maps else ()
        sheet, without = head_sheet(seen, maps, sort, options.top), seen.others
        of_mass, over = (with_rows(layers, mass, without)[1], note), patch_sheets(seen, names)
        rows, depths = with_rows(layers, panels, without), depths_of(seen, options.depth, sort)
        return cls(
            maps, tuple(names), *rows, about(seen), of_mass, sheet, dict(without), dict(seen.within), over, depths
        )

    def draw(
        self,
        folder: Path,
        kinds: Sequence[str] = FIGURES,
        style: Style = Style(),
        workers: int | None = 1,
        advance: Advance = lambda steps: None,
    ) -> list[Path]:
        """Write overview, layers/, heads/ and metrics into a folder; the paths.

        workers: processes that draw heads; None for as many as pay, and for the process that was started beforehand.
        """
        style = replace(style, about=replace(self.about, command=style.about.command))
        process, written = take_process() if workers is None else None, list[Path]()
        drawn = self._apart(process, folder, kinds, style) if process else self.drawn(folder, kinds, style, workers)
        with closing(drawn):
            for path in drawn:
                written.append(path)
                advance(1)
        return written

    def drawn(
        self, folder: Path, kinds: Sequence[str], style: Style, workers: int | None = 1
    ) -> Generator[Path, None, None]:
        """`draw` for a style that says what is drawn, one path at a time."""
        if "overview" in kinds and self.maps:
            yield figures.save_overview(folder / f"overview.{style.image}", rows_of(self.maps, self.without), style)
        layers = [(folder / "layers" / f"L{maps.layer:02d}.{style.image}", maps) for maps in self._drawn_layers(kinds)]
        yield from figures.save_layers(layers, style)
        if jobs := self._jobs(folder, kinds, style):
            yield from figures.head_maps(jobs, style, workers=workers)
        labels = [f"L{layer_name(layer, self.within.get(layer, ''))}" for layer in self.layers]
        if "metrics" in kinds and self.panels:
            yield figures.save_metrics(folder / f"metrics.{style.image}", self.panels, style, layer_labels=labels)
        panels, note = self.mass
        if "mass" in kinds and panels:
            words = {"title": "Mass on the named keys", "note": note}
            yield figures.save_metrics(folder / f"mass.{style.image}", panels, style, layer_labels=labels, **words)
        if "top" in kinds and self.sheet:
            yield figures.save_layer(folder / f"top.{style.image}", self.sheet, style)
        if "depth" in kinds and self.depth[0]:
            yield figures.save_depth(folder / f"depth.{style.image}", self.depth[0], style, self.depth[1])
        for number, sheet in enumerate(self.over if OVER in kinds else ()):
            name = f"{OVER}{number + 1 if number else ''}.{style.image}"
            yield figures.save_patches(folder / name, sheet, style)

    def _apart(
        self, process: DrawingProcess, folder: Path, kinds: Sequence[str], style: Style
    ) -> Generator[Path, None, None]:
        """`drawn` in the processes that were started, but for heads that pay for several."""
        jobs = self._jobs(folder, kinds, style)
        several = worker_count([maps.values_HQK[0].size for _, maps, _ in jobs], style) > 1
        there = [kind for kind in kinds if kind != "heads" or not several]
        halves = [kind for kind in there if kind in ALL_HEADS], [kind for kind in there if kind not in ALL_HEADS]
        with closing(process.drawn(*(partial(self.drawn, folder, half, style) for half in halves))) as drawn:
            if several:
                yield from self.drawn(folder, ["heads"], style, None)
            yield from drawn

    def _jobs(self, folder: Path, kinds: Sequence[str], style: Style) -> list[tuple[Path, Maps, int]]:
        return head_jobs(folder, self.maps, self.heads, style) if "heads" in kinds else []

    def pictures(self, kinds: Sequence[str] = FIGURES) -> int:
        """How many steps `draw` will report."""
        alone = {"overview": self.maps, "metrics": self.panels, "mass": self.mass[0], "top": self.sheet}
        heads = len(self.heads) * ("heads" in kinds) if self.maps else 0
        over = len(self.over) * (OVER in kinds) + bool("depth" in kinds and self.depth[0])
        return heads + len(self._drawn_layers(kinds)) + over + sum(bool(alone.get(kind)) for kind in kinds)

    def _drawn_layers(self, kinds: Sequence[str]) -> list[Maps]:
        return [maps for maps in self.maps if maps.layer in self.layers] if "layers" in kinds else []


def drawings(seen: Observation, options: DrawingOptions = DrawingOptions()) -> dict[str, Drawing]:
    """What there is to draw of every stack, by the folder that it goes to: "" where there is one.

    A stack without the metric that heads are sorted by has no sheet of them. Raises UsageError where none has it.
    """
    if not seen.other_stacks:
        return {"": Drawing.of(seen, options)}
    seen.kept_heads(options.sort)
    by = order_of(options.sort)[0] if options.sort else ""
    drawn = {}
    for stack, obs in seen.stacks.items():
        sorted_too = not by or by in COLUMNS or by in obs.columns.scores
        if not obs.chosen.nothing:
            of_stack = options if sorted_too else replace(options, sort=None, top=0)
            drawn[stack] = Drawing.of(obs, of_stack, f"{stack} " * (stack in seen.other_stacks))
    return drawn


@dataclass(frozen=True)
class Pictures:
    """What to draw of every text of a corpus; called with an observation where the model is, drawn in another process.

    Of a model with several stacks there is a folder for each.
    """

    kinds: tuple[str, ...]
    style: Style = Style()

    def __call__(self, seen: Observation) -> dict[str, Drawing]:
        """Everything that the drawing needs, without torch."""
        return drawings(seen)

    def draw(self, by_stack: Mapping[str, Drawing], folder: Path) -> None:
        """Draw into a folder, made if need be."""
        for stack, drawing in by_stack.items():
            (folder / stack).mkdir(parents=True, exist_ok=True)
            drawing.draw(folder / stack, self.kinds, self.style)


def about(seen: Observation) -> About:
    """What a figure is of: model, text and tokens, each shortened to what a line holds."""
    model = " ".join(str(seen.facts.get("model", {}).get("name", "")).split())
    texts = [_said(seen.queries)] + [_said(seen.keys)] * (seen.keys.text != seen.queries.text)
    room = LONGEST_TEXT if len(texts) == 1 else LONGEST_TEXT // 2
    quoted = " ← ".join(shortened(" ".join(text.split()), room) for text in texts)
    of_text = seen.keys if seen.stack == POOLING else seen.queries
    counted = f"{len(of_text)} {'patches' if seen.stack == GLOBAL else 'tokens'}"
    channel = "" if seen.view.channel is None or seen.stack != CHANNELS else f"channel {seen.view.channel}"
    named = shortened(model_name(model), LONGEST_NAME), f"“{quoted}”" * bool(quoted), counted, channel
    line = ", ".join(filter(None, named))
    return About(line, model, seen.queries.sha256)


def _said(prompt: Prompt) -> str:
    """The text of a prompt; where pictures were given, without the tokens around them."""
    if not prompt.medium.patches:
        return prompt.text
    return "".join(word for word, special in zip(prompt.plain, prompt.special, strict=True) if not special)


def head_sheet(seen: Observation, maps: Sequence[Maps], sort: str | None, top: int | None) -> Maps | None:
    """The first heads in an order side by side, with role and score in their titles."""
    there = {name: (maps_of_layer, index) for maps_of_layer in maps for index, name in enumerate(_names(maps_of_layer))}
    stack = maps[0].stack if maps else ""
    heads = [head for head in seen.kept_heads(sort)[:top] if stack + head.name in there]
    if not heads:
        return None
    chosen = [there[stack + head.name] for head in heads]
    name = order_of(sort)[0] if sort else ""
    # `L3H0 induction, focus 0.61`
    titles, roles = [], tuple(_shown_role(head.role) for head in heads)
    scores = [abs(head.score[name]) for head in heads if math.isfinite(head.score.get(name, math.nan))]
    decimals = decimals_of(max(scores, default=1.0))
    for head, role in zip(heads, roles, strict=True):
        title = f"{stack}{head.name} {role}".rstrip()
        scored = math.isfinite(head.score.get(name, math.nan))
        score = f", {KNOWN[name].short} {printed(head.score[name], decimals)}" if scored else ""
        titles.append(title + score)
    return replace(
        chosen[0][0],
        heads=tuple(range(len(chosen))),
        values_HQK=np.stack([maps_of_layer.values_HQK[index] for maps_of_layer, index in chosen]),
        kv_heads=(),
        key0=tuple(maps_of_layer.key0[index] for maps_of_layer, index in chosen if maps_of_layer.key0),
        sinks=tuple(maps_of_layer.sinks[index] for maps_of_layer, index in chosen if maps_of_layer.sinks),
        roles=roles,
        window="",
        parallel="",
        titles=tuple(titles),
        name=f"First {len(heads)} of {len(seen.heads)} heads" + (f" by {KNOWN[name].title}" if name in KNOWN else ""),
    )


def _names(maps: Maps) -> list[str]:
    return [maps.stack + head_name(maps.layer, head, maps.by_kv) for head in maps.heads]


def draw_alone(path: Path, draw: Callable[[Path], Sequence[Path | None]], hint: str) -> Path:
    """A picture as a file of its own; draw: draws it into a folder, which goes away.

    Raises UsageError, with the hint, where it draws none, or several.
    """
    with TemporaryDirectory(prefix="attnscope-") as folder:
        drawn = [file for file in draw(Path(folder)) if file is not None]
        if not drawn:
            raise UsageError(f"there is no picture to write to {path}", hint)
        if len(drawn) > 1:
            names = ", ".join(file.relative_to(folder).as_posix() for file in drawn[:3]) + ", …" * (len(drawn) > 3)
            raise UsageError(f"{path} is one picture, and {len(drawn)} are drawn: {names}", hint)
        return write_whole(path, lambda temp: temp.write_bytes(drawn[0].read_bytes()))


def check_kinds(kinds: Sequence[str], seen: Observation) -> None:
    """Raise UsageError for a figure that does not exist, or that an observation has nothing for."""
    for kind in kinds:
        known = (*FIGURES, *ASKED_FOR, OVER)
        if kind not in known:
            raise UsageError(f"there is no figure {kind!r}", f"the figures are {', '.join(known)}")
    if "mass" in kinds and seen.chosen.key is None:
        raise UsageError("the figure mass shows the mass on named keys", "name them with {key}")


def layer_maps(seen: Observation, stack: str = "") -> list[Maps]:
    """The observation's matrices as figures take them: with labels, bins, kv heads and turns; stack: see `Maps`."""
    kept, by_kv = seen.maps, seen.view.by_kv
    if kept is None:
        raise UsageError("this observation kept no maps", "ask with Request(maps=...)")
    signed = any(is_linear(key.stack) for key in kept.values)
    largest = "entry with the largest |w|" if signed else "largest entry"
    rule = "sum over keys, mean over queries" if kept.rule == "sum" else largest
    starts_Q, starts_K = tuple(kept.rows.starts), tuple(kept.columns.starts)
    words = chosen_words(seen)
    part = Part(words, tuple(kept.rows.tokens), tuple(kept.columns.tokens)) if words else None
    # a part of the tokens has no turns: its rows are not in the order of the text
    second = seen.queries.segments[1:]
    turns = {turn.start // kept.bin_size for turn in (*seen.queries.turns, *second) if not part} - {0}
    # the key that gets most from each head, and its mean mass: key 0 where the top key has little
    columns, places, sinks = seen.columns, {}, {}
    for key in kept.values:
        of_layer = np.flatnonzero((columns.layer == key.layer) & (columns.stack == key.stack))[list(kept.heads[key])]
        places[key] = of_layer
        mass, top_key = columns.top_key_mass[of_layer], columns.top_key[of_layer]
        top_key = np.where(mass > seen.rests_above, top_key, 0)
        sinks[key] = tuple(zip(top_key.tolist(), mass.tolist(), strict=True))
    named = any(roles is not None for roles in columns.atlas_roles)  # in a run's tables, too
    elsewhere = any(key for layer in sinks.values() for key, _ in layer)  # all maps of a text have the same columns
    return [
        Maps(
            layer=key.layer,
            heads=tuple(kept.heads[key]),
            values_HQK=np.ascontiguousarray(values),
            labels_Q=tuple(seen.queries.labels[start] for start in starts_Q),
            labels_K=tuple(seen.keys.labels[start] for start in starts_K),
            bin_size=kept.bin_size,
            bin_rule=rule if max(kept.rows.size, kept.columns.size) > 1 else "",
            kv_heads=() if by_kv else _kv_heads(seen, key, kept.heads[key]),
            by_kv=by_kv,
            quantity=_quantity(seen, key),
            starts_Q=starts_Q,
            starts_K=starts_K,
            turns=tuple(sorted(turns)),
            begins="the second text" if second else "a turn",
            key0=tuple(kept.key0[key].tolist()) if key in kept.key0 else (),
            sinks=sinks[key] if elsewhere else (),
            part=part,
            roles=tuple(map(_shown_role, columns.role[places[key]])),
            role_scores=tuple(_role_score(columns, place) for place in places[key].tolist()),
            roles_by="a scan of the model" if named else "this text",
            stack=stack,
            numbered=(seen.queries.medium.step is None, seen.keys.medium.step is None),
            window=seen.visible[key] if seen.visible[key].startswith(WINDOWS) else "",
            ahead=is_bidirectional(key.stack),
            parallel=seen.within.get(key.layer, ""),
        )
        for key, values in kept.values.items()
    ]


def _quantity(seen: Observation, key: LayerKey) -> Quantity:
    """What a layer's map shows; of a chosen channel its own weights, signed."""
    if key.stack == CHANNELS and seen.view.channel is not None:
        return "channel"
    return OF_STACKS.get(key.stack) or QUANTITIES[seen.view.weights]


def _shown_role(role: str) -> str:
    """A role as a title has it: nothing for a head without one."""
    return "" if role in (NONE, OTHER) else role


def _role_score(columns: HeadColumns, place: int) -> float:
    """What a head scores on the text in the metric of its role; NaN without one, as for offset-2."""
    score = columns.scores.get(ROLE_METRICS.get(columns.role[place], ""))
    return math.nan if score is None else float(score.value[place])


def _kv_heads(seen: Observation, key: LayerKey, heads: Sequence[int]) -> tuple[int, ...]:
    """The kv head of each; empty where they are not known, and of linear layers, which have none."""
    if mixes(key.stack):
        return ()
    return tuple(kv_head for head in heads if (kv_head := seen.kv_head(key, head)) is not None)


def rows_of(layers: Sequence[Maps], without: Mapping[int, str]) -> list[Maps]:
    """The rows of an overview: the layers with attention, and in their places those without, as maps of no heads."""
    if not layers:
        return []
    none = replace(
        layers[0], heads=(), values_HQK=layers[0].values_HQK[:0], kv_heads=(), key0=(), sinks=(), roles=(), parallel=""
    )
    others = [replace(none, layer=layer, name=what) for layer, what in without.items()]
    return sorted([*layers, *others], key=lambda maps: maps.layer)


def head_jobs(folder: Path, layers: Sequence[Maps], names: Sequence[str], style: Style) -> list[tuple[Path, Maps, int]]:
    """A file per named head, in the model's order: heads/L27H03.png, heads/L27KV03.png."""
    mark, wanted = ("KV" if layers and layers[0].by_kv else "H"), set(names)
    return [
        (folder / "heads" / f"L{maps.layer:02d}{mark}{head:02d}.{style.image}", maps, index)
        for maps in layers
        for index, (head, name) in enumerate(zip(maps.heads, _names(maps), strict=True))
        if name in wanted
    ]


def terminal_maps(seen: Observation, names: Sequence[str], style: Style, side: int) -> list[HeadMaps]:
    """The named heads, in that order, as a terminal draws them: at most so many rows of cells each.

    Heads whose maps show something else have a legend of their own, and come after the others.
    """
    from attnscope.figures.mosaic import prepare_heads
    from attnscope.figures.terminal import HeadMaps

    jobs: dict[str, tuple[Path, Maps, int]] = {}
    for stack, obs in seen.stacks.items():
        if obs.maps is not None:
            obs = obs.keeping(maps=coarser(obs.maps, side, style.sink == "mask"))
            maps = layer_maps(obs, f"{stack} " * (stack in seen.other_stacks))
            jobs |= {name: (Path(), of, index) for of in maps for index, name in enumerate(_names(of))}

    there = [jobs[name] for name in names if name in jobs]
    by_quantity: dict[Quantity, list[tuple[Path, Maps, int]]] = {}
    for job in there:
        by_quantity.setdefault(job[1].quantity, []).append(job)
    styles = {quantity: style.of_quantity(quantity) for quantity in by_quantity}
    return [HeadMaps(prepare_heads(jobs, styles[of]), styles[of]) for of, jobs in by_quantity.items()]


def coarser(maps: LayerMaps, side: int, key0_apart: bool) -> LayerMaps:
    """The same with neighbouring cells put together, so that at most `side` rows are left; key 0 stays apart if asked.

    As the probe bins tokens: sum over keys, mean over queries, or the largest entry.
    """
    from attnscope.figures.mosaic import column_mean

    (rows, fewer_rows), (columns, fewer_columns) = maps.rows.coarser(side), maps.columns.coarser(side, key0_apart)
    if (fewer_rows, fewer_columns) == (maps.rows, maps.columns):
        return maps
    tokens_Q1 = np.array(maps.rows.sizes)[:, None]

    def together(values_HQK: np.ndarray) -> np.ndarray:
        if maps.rule == "max":
            return np.fmax.reduceat(np.fmax.reduceat(values_HQK, columns, -1), rows, -2)
        summed = np.add.reduceat(np.nan_to_num(values_HQK) * tokens_Q1, rows, -2) / np.add.reduceat(tokens_Q1, rows)
        seen = np.logical_or.reduceat(np.isfinite(values_HQK), rows, -2)
        cells, there = np.add.reduceat(summed, columns, -1), np.logical_or.reduceat(seen, columns, -1)
        return np.where(there, cells, np.nan).astype(np.float32)

    key0 = maps.key0
    if key0_apart and maps.bin_size == 1 and maps.rule == "sum" and maps.columns.tokens[0] == 0:
        key0 = PerLayer(
            {
                key: np.array([column_mean(values_QK[:, 0], values_QK[:, 1:]) for values_QK in values_HQK])
                for key, values_HQK in maps.values.items()
            }
        )
    values = PerLayer({key: together(values) for key, values in maps.values.items()})
    return replace(maps, values=values, rows=fewer_rows, columns=fewer_columns, key0=key0)


def save_rollout(seen: Observation, folder: Path, style: Style) -> Path:
    """rollout.png: units x units, put together where there are more than a map takes."""
    rolled = seen.rollout
    if rolled is None:
        raise UsageError("this observation kept no rollout", 'ask with Request(rollout="tokens")')
    # units of which there are too many for a picture are put together, `step` to a cell
    values_RG, by_row, step = rolled.binned()
    bins = rolled.group == "bins"
    labels, run = unit_labels(seen.queries, rolled.units, rolled.group), rolled.longest if bins else 1
    starts = tuple(unit.start for unit in rolled.units) if rolled.group in ("bins", "tokens") else ()
    rows = rolled.shown[::by_row].tolist()
    name = "token" if bins else rolled.group.removesuffix("s")
    maps = Maps(
        layer=rolled.layers[-1],
        heads=(0,),
        values_HQK=values_RG[None],
        labels_Q=tuple(labels[row] for row in rows),
        labels_K=labels[::step],
        bin_size=run,
        bin_rule="sum over keys, mean over queries" if run > 1 else "",
        quantity="share",
        starts_Q=tuple(starts[row] for row in rows) if starts else (),
        starts_K=starts[::step],
        axes=(name, "attributed to"),
    )
    # a rollout is of a stack and not of a head: its picture is drawn as a head's, under a title of its own
    title = f"Rollout of {len(rolled.layers)} {prefix(seen.stack)}layers" + f", {step} {rolled.group} a cell" * (
        step > 1
    )
    look = replace(style, about=replace(about(seen), command=style.about.command))
    jobs = [(folder / f"rollout.{style.image}", maps, 0)]
    return figures.save_head_maps(jobs, look, title=lambda maps, index: title)[0]


def unit_labels(prompt: Prompt, units: Sequence[Span], group: str) -> tuple[str, ...]:
    """What is written next to each unit: the label of its first token, a word, `S4 Lily was very` of a sentence."""
    if group in ("bins", "tokens"):
        return tuple(prompt.labels[unit.start] for unit in units)
    if group == "words":
        return tuple(unit.name.strip() or unit.name for unit in units)
    special = [unit.stop - unit.start == 1 and prompt.special[unit.start] for unit in units]
    number = np.cumsum(np.logical_not(special)).tolist()
    return tuple(
        unit.name if alone else f"S{place} {' '.join(unit.name.split())}"
        for unit, alone, place in zip(units, special, number, strict=True)
    )


def head_picture(seen: Observation, layer: int, head: int, **style: Unpack[StyleFields]) -> Picture:
    """One head's labelled heatmap; style: fields of `Style`.

    Raises UsageError for a head without a kept map, UnknownLayerError for a layer without attention.
    """
    name, look, maps = head_name(layer, head, seen.view.by_kv), _style(seen, style), layer_maps(seen)
    if not head_jobs(Path(), maps, [name], look):
        _ = seen.kv_of[layer]  # a layer without attention is refused with those that have it
        raise UsageError(f"there is no map of {name}", "the observation keeps the maps that its Request asks for")
    return picture_of(name, look, lambda to, look: figures.save_head_maps(head_jobs(to, maps, [name], look), look)[0])


def overview_picture(seen: Observation, **style: Unpack[StyleFields]) -> Picture:
    """Every head of every layer as a thumbnail; style: fields of `Style`."""
    look, rows = _style(seen, style), rows_of(layer_maps(seen), seen.others)
    return picture_of("overview", look, lambda to, look: figures.save_overview(to / "overview.png", rows, look))


def over_picture(
    seen: Observation, heads: Sequence[str] = (), picture: int = 0, **style: Unpack[StyleFields]
) -> Picture:
    """Where the chosen queries look in a picture, over it; heads: `L1H3`, or none for those that look most at it.

    picture: which, counted from 0. style: fields of `Style`. Raises UsageError where there is nothing to draw.
    """
    sheets, look = patch_sheets(seen, heads), _style(seen, style)
    if not 0 <= picture < len(sheets):
        raise UsageError(f"there is no picture {picture} to draw on", "ask with a picture and Request(per_token=True)")
    return picture_of(OVER, look, lambda to, look: figures.save_patches(to / "over.png", sheets[picture], look))


def _style(seen: Observation, style: StyleFields) -> Style:
    known = sorted(StyleFields.__annotations__)
    if unknown := sorted(set(style).difference(known)):
        raise UsageError(f"a picture has no {unknown[0]!r}", f"it has {', '.join(known)}")
    return Style(**style, about=about(seen))


def picture_of(title: str, style: Style, draw: Callable[[Path, Style], Path]) -> Picture:
    """A picture in memory, of what writes a PNG into a folder and returns its path."""
    with TemporaryDirectory(prefix="attnscope-") as folder:
        return Picture(draw(Path(folder), replace(style, image="png")).read_bytes(), title)
