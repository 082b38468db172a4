"""`attnscope.compare`, and what the command of that name runs: two texts, or two models, head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.api.records import DrawnRecord
from attnscope.errors import InputError, UsageError, hints_of
from attnscope.export.drawing import picture_of
from attnscope.export.manifest import NAME, TARGET, prompt_of, read_manifest
from attnscope.export.study_figures import panels, save_comparison
from attnscope.figures import Style, save_metrics
from attnscope.inputs.sound import Sound
from attnscope.metrics.metrics import METRICS
from attnscope.model.libraries import versions
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.model.selection import select_stacks
from attnscope.observe.atlas import atlas_of
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from attnscope.studies.baseline import (
    TEXT_ROLES,
    SideNumbers,
    baseline_document,
    beside_baseline,
    check_answered,
    ids_digest,
    read_baseline,
    read_numbers,
)
from attnscope.studies.comparison import (
    OneSide,
    check_alike,
    check_folder,
    compare_heads,
    comparison_facts,
    heads_table,
    metrics_table,
    tokens_table,
)
from attnscope.studies.comparison import heads_of as counts_of
from attnscope.studies.gate import judge, parse_gate
from attnscope.utils.display import number_of
from attnscope.utils.files import check_types, damaged, read_json, read_small, save_json, sha256_of
from attnscope.utils.schema import takes_fields
from attnscope.utils.stages import NO_PROGRESS, Progress
from attnscope.utils.tables import read_delimited

if TYPE_CHECKING:
    from attnscope.export.drawing import Picture
    from attnscope.inputs.prompt import Side
    from attnscope.inputs.spans import Align
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.atlas import HeadNames
    from attnscope.observe.request import EngineWord, Text
    from attnscope.observe.run import Run
    from attnscope.studies.comparison import Comparison
    from attnscope.studies.gate import Verdict

HeadsOfStacks = Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is compared, and how the texts are read; the last five are fields of `CaptureSpec`.

    compare_text: what the other side reads instead of the same text. align: how tokens are paired, by "position" or by
    "text"; by position without it where both sides have as many words. select, atlas: the heads that are listed, in
    the grammar of --select. engine: who computes the attention. compare_engine: who does on the other side, the same
    without it. memory: what may be kept of the first side. gate: what every listed head is held to, such as
    "visible=same,js<0.01,role=same". baseline: what an earlier run left, instead of the other side: a file of
    `save_baseline`, or the folder or manifest of a run of one text.
    """

    compare_text: str | None = None
    align: Align | None = None
    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    engine: EngineWord = "auto"
    compare_engine: EngineWord | None = None
    memory: str | None = None
    gate: str | None = None
    baseline: Path | str | None = None
    chat: bool = False
    truncate: Side | None = None
    target: str | list[int] | None = None
    pair: str | None = None
    global_tokens: str | None = None


class SidesOfText(NamedTuple):
    """What either side reads, and how messages call it."""

    name: str
    first: Text
    other: Text


@dataclass(frozen=True)
class ComparisonTexts:
    """The texts of a comparison and how they are read; ready: called with either run of a single text."""

    texts: Sequence[SidesOfText]
    options: CompareOptions
    tell: Progress = NO_PROGRESS
    ready: Callable[[Run], object] = lambda run: None


@dataclass(frozen=True)
class CompareCall(CompareOptions):
    """What `attnscope.compare` is called with."""

    model: LoadedModel
    other: LoadedModel | None
    text: Text | Sequence[str]


@hints_of(LoadOptions)
@takes_fields(CompareCall)
def compare(call: CompareCall) -> Compared:
    """Two models on the same texts, or one model on two texts, head by head.

    text: one text, or a list of them, over which differences get intervals from 32 on. other: None where a baseline
    takes its place. options: the fields of `CompareOptions`: compare_text, align, select, atlas, engine,
    compare_engine, memory, gate, baseline, chat, truncate, target, pair, global_tokens. Raises UsageError for models of
    other layers or heads, and for a gate that is none, InputError for texts that share no word.

        >>> attnscope.compare(model, model, "Mary gave John a book", compare_text="John gave Mary a book").table()
        >>> attnscope.compare(model, tuned, texts).table().to_pandas()
        >>> attnscope.compare(model, tuned, texts, gate="visible=same,js<0.01").verdict.holds
    """
    check_loaded(call.model)
    if call.baseline is None:
        check_loaded(call.other)
    elif call.other is not None or call.compare_text is not None:
        raise UsageError("a baseline takes the place of the other side", "pass None as the other model, and one text")
    text: Any = call.text
    # Several texts are read by both sides; ids of tokens are one text, too.
    if isinstance(text, Sequence) and not isinstance(text, str) and text and all(isinstance(one, str) for one in text):
        for name in ("compare_text", "target"):
            if getattr(call, name) is not None:
                raise UsageError(f"{name} is of one text, and several were given", "give one text")
        texts = [SidesOfText(f"text {number}", part, part) for number, part in enumerate(text)]
    else:
        texts = [SidesOfText("the text", text, text if call.compare_text is None else call.compare_text)]
    return compared(ComparisonTexts(texts, call), [model for model in (call.model, call.other) if model is not None])


def compared(
    sides: ComparisonTexts,
    models: Sequence[LoadedModel],
    *,
    options: Mapping[str, Any] | None = None,
    out: Path | None = None,
    force: bool = False,
    maps: bool = True,
) -> Compared:
    """Read both sides of every text; with a baseline one side, against what an earlier run left.

    models: of both sides, or one. options: what compare.json says was asked for; out, force: the folder that it is to
    be written to, which is refused before the passes where it holds another comparison. maps: keep the maps of one
    pair, to be drawn.
    """
    texts, asked = sides.texts, sides.options
    # What can be refused is refused before the passes: other models, heads that are not there, a folder of another.
    conditions = None if asked.gate is None else parse_gate(asked.gate)
    options = _options(asked) if options is None else options
    if asked.baseline is None:
        if conditions and asked.compare_text is not None:
            raise UsageError("a gate holds two models to each other, and two texts differ", "leave out {gate}")
        check_alike(*models)
        before, read = None, [part for text in texts for part in text[1:]] + [asked.pair] * (asked.pair is not None)
    else:
        path = Path(asked.baseline)
        before, read = baseline_of(path), [text.first for text in texts]
        check_answered(conditions or (), before)
        options = {**options, "baseline": sha256_of(path / NAME if path.is_dir() else path)}
    heads = heads_of(models[0], asked)
    facts = comparison_facts(models, [getattr(part, "sha256", str(part)) for part in read], options)
    if out is not None:
        check_folder(out, facts, force)
    if before is not None:
        comparison = beside_baseline(numbers_of(sides, models[0]), before)
    else:
        # Each layer is compared as soon as the second pass has read it.
        steps = 2 * len(texts) * sum(map(len, models[0].geometry.stacks.values()))
        with sides.tell.stage("forward passes", steps, "layers") as advance:
            comparison = compare_heads(
                ((_side(first), _side(other)) for first, other in _runs(sides, models)),
                maps=heads if maps and len(texts) == 1 else None,
                memory=asked.memory,
                align=asked.align,
                changes=conditions is not None,
                advance=advance,
            )
    # All heads are compared, since they share their passes; those that were chosen are listed, and judged.
    chosen = {(stack, layer, head) for stack, of in heads.items() for layer, here in of.items() for head in here}
    at = [(stack, *head) for stack, head in zip(comparison.head_stacks, comparison.heads, strict=True)]
    places, verdict = [place for place in comparison.order if at[place] in chosen], None
    if conditions is not None:
        named_by = atlas_of(models[0], asked.atlas)
        verdict = judge(comparison, conditions, places, named_by.roles if named_by else None)
    return Compared(comparison, places, facts, verdict)


def _options(asked: CompareOptions) -> dict[str, Any]:
    """Those that change the numbers."""
    atlas = str(asked.atlas) if isinstance(asked.atlas, str | Path) else None
    names = ("align", "select", "engine", "compare_engine", "chat", "truncate", "target", "global_tokens")
    return {"atlas": atlas, **{name: getattr(asked, name) for name in names}}


def heads_of(loaded: LoadedModel, options: CompareOptions) -> HeadsOfStacks:
    """The heads that are listed and drawn, by stack: those that `select` names, or all."""
    atlas, geometry = atlas_of(loaded, options.atlas), loaded.geometry
    named = atlas.by_role() if atlas else None
    return select_stacks(options.select, counts_of(loaded), geometry.stack, named, takes="a comparison is of")


def _side(run: Run) -> OneSide:
    return OneSide(run.loaded, run.prompt, run.engine, run.source)


def _runs(sides: ComparisonTexts, loaded: Sequence[LoadedModel]) -> Iterator[list[Run]]:
    """What is about to be read of each text, by one model, or by two; of many texts those that do not fit are named."""
    texts, asked = sides.texts, sides.options

    def prepared(model: LoadedModel, text: Text, chat: bool, engine: EngineWord) -> Run:
        how = {"engine": engine, "memory": asked.memory, "truncate": asked.truncate, "target": asked.target}
        how |= {"pair": asked.pair, "global_tokens": asked.global_tokens}
        return prepare(model, CaptureSpec(text, chat=chat, **how))  # type: ignore[arg-type]

    for name, first, other in texts:
        try:
            runs = [prepared(loaded[0], first, asked.chat, asked.engine)]
            written = isinstance(other, str | Sound)  # tokens are of one model: the other reads what they say
            for model in loaded[1:]:
                read, engine = other if written else runs[0].text.text, asked.compare_engine or asked.engine
                runs.append(prepared(model, read, asked.chat and written, engine))
        except InputError as error:
            if len(texts) == 1:
                raise
            sides.tell.say(f"left out: {name}: {error.message}")
            continue
        for run in runs if len(texts) == 1 else ():
            sides.ready(run)
        yield runs


def numbers_of(sides: ComparisonTexts, loaded: LoadedModel) -> SideNumbers:
    """What a baseline keeps of every text, from one pass over each."""
    steps = len(sides.texts) * sum(map(len, loaded.geometry.stacks.values()))
    with sides.tell.stage("forward passes", steps, "layers") as advance:
        return read_numbers((_side(run) for [run] in _runs(sides, [loaded])), advance)


def save_baseline(path: Path, sides: ComparisonTexts, loaded: LoadedModel) -> SideNumbers:
    """Read every text and write what a later run is held to, the baseline of a gate, to a file."""
    numbers = numbers_of(sides, loaded)
    about = {name: getattr(loaded, name) for name in ("name", "revision", "dtype", "device")}
    document = baseline_document(numbers, {"model": about, "engine": sides.options.engine, "versions": versions()})
    save_json(document, path)
    return numbers


def baseline_of(path: Path) -> SideNumbers:
    """What an earlier run left: the file of a baseline, or the folder or manifest of a run of one text.

    Raises UsageError for what is neither and for another version, InputError for what is damaged.
    """
    manifest = path / NAME if path.is_dir() else path
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}", "name a file of {save_baseline}, or a run's folder")
    if path.is_dir() and not manifest.exists():
        message = f"{path} holds no run: there is no {NAME}"
        raise UsageError(message, "name the file of {save_baseline}, or a run's folder")
    with damaged(f"{manifest} is not a baseline, or cannot be read", "save one with {save_baseline}"):
        document = read_json(manifest)
        check_types(document, {"schema": str})
        if not document["schema"].startswith("run/"):
            return read_baseline(manifest)
        # Of a run its tokens, and the numbers and roles of its heads; it has no masks.
        about = read_manifest(manifest)
        prompt = prompt_of(about, manifest)
        target = prompt_of(about, manifest, TARGET) if TARGET in about else None
        read = (prompt.ids,) if target is None else (target.ids, prompt.ids)
        rows = read_delimited(pa.BufferReader(read_small(manifest.parent / "heads.csv"))).to_pylist()
        numbers = np.array([[np.nan if row[name] is None else row[name] for row in rows] for name in METRICS], float)
        roles = [str(row["text_role"]) for row in rows]
        # A file of another kind must not pass as numbers of heads.
        if not rows or any(role not in TEXT_ROLES for role in roles):
            raise ValueError("no heads, or roles of another kind")
        return SideNumbers(
            heads=tuple((int(row["layer"]), int(row["head"])) for row in rows),
            head_stacks=tuple(str(row["stack"]) for row in rows),
            texts=(ids_digest(*read),),
            metrics=dict(zip(METRICS, numbers[:, None], strict=True)),
            roles=np.array([roles], object),
            own=np.zeros((1, len(rows)), int),
            masks=None,
        )


@dataclass(frozen=True, repr=False)
class Compared(DrawnRecord):
    """Two sides, head by head; places: of the heads that are listed, the largest divergence first.

    asked: what tells this comparison from another. verdict: what a gate says of it, None without one.
    """

    found: Comparison
    places: Sequence[int]
    asked: Mapping[str, Any]
    verdict: Verdict | None = None

    @property
    def line(self) -> str:
        comparison, apart = self.found, ""
        for most in self.places[:1] if comparison.has_divergence else ():
            apart = f"; most apart: {comparison.name(most)}, {float(comparison.js.effect[most]):.3g} bits"
        gate = f"; {self.verdict.line}" if self.verdict else ""
        return f"{len(self.places)} heads over {number_of(comparison.texts, 'text')}{apart}{gate}"

    @property
    def failures(self) -> list[str]:
        """What did not hold in a pass, in words."""
        return list(self.found.failures)

    def table(self) -> pa.Table:
        """A row per head: js in bits with its interval, lost mass, and each metric's difference."""
        return heads_table(self.found, self.places)

    def metrics_table(self) -> pa.Table:
        """A row per metric and head: the metric on both sides, its difference with an interval."""
        return metrics_table(self.found, self.places)

    def tokens_table(self) -> pa.Table:
        """The tokens that two texts share, and those without a partner. Raises UsageError for several texts."""
        if self.found.pair is None:
            raise UsageError("tokens are paired text by text, and this is of several", "compare one text")
        return tokens_table(self.found.pair)

    def figure(self, stack: str | None = None, style: Style = Style()) -> Picture:
        """The divergence and every metric's difference as layers x heads maps; stack: the first without it."""
        layers, drawn = panels(self.found, stack)
        title = f"Differences in {len(layers)} layers"

        def draw(folder: Path, style: Style) -> Path:
            return save_metrics(folder / "differences.png", drawn, style, layer_labels=layers, title=title)

        return picture_of(title, style, draw)

    def export(self, folder: str | Path, *, force: bool = False, style: Style = Style()) -> list[Path]:
        """Write tables, signed maps and compare.json; the paths.

        Raises UsageError for a folder that holds another comparison, unless force says to write over it.
        """
        check_folder(Path(folder), self.asked, force)
        return save_comparison(self.found, Path(folder), self.asked, style, places=self.places, gate=self.gate_facts)

    @property
    def gate_facts(self) -> Mapping[str, Any] | None:
        """The gate's verdict as compare.json has it; None without one."""
        return self.verdict.facts if self.verdict else None
