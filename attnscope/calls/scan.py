"""`attnscope.scan`, and what the command of that name runs: what each head does on probes, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.calls.records import Record, picture_of
from attnscope.errors import hints_of
from attnscope.figures import Style
from attnscope.folder.parts import claim, with_weights
from attnscope.model.loaded import check_loaded
from attnscope.model.options import LoadOptions
from attnscope.show.atlas import HEAD_JS, save_head_js, save_probes
from attnscope.study.atlas.probes import SEQUENCES
from attnscope.study.atlas.scan import READINGS, plan, scan_cost, scan_heads, scan_seconds
from attnscope.study.atlas.texts import DIVERGENCES, LOOKS, on_texts, prompts_of
from attnscope.tables import save
from attnscope.telling import SILENT, Teller
from attnscope.typed import takes_fields

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.drawing import Picture
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.scan import Plan
    from attnscope.study.atlas.texts import OnTexts
    from attnscope.text.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What a scan reads, and where it is kept.

    sequences: of each probe. seed: of what is drawn. pool: the token ids that probes are made of; those that the
    tokenizer tells to be whole words without it. texts: on these, how far apart heads are and what each looks like.
    out: a folder in which a stopped scan goes on. force: write over another scan there.
    """

    sequences: int = SEQUENCES
    seed: int = 0
    pool: Sequence[int] | None = None
    texts: Sequence[str] | None = None
    out: str | Path | None = None
    force: bool = False


@dataclass(frozen=True)
class ScanCall(ScanOptions):
    """What `attnscope.scan` is called with."""

    model: LoadedModel


@hints_of(LoadOptions)
@takes_fields(ScanCall)
def scan(call: ScanCall) -> Scan:
    """What each head does on probes, against a null, with intervals.

    options: the fields of `ScanOptions`: sequences, seed, pool, texts, out, force. Raises UsageError for an option
    that does not exist and for a folder with another scan, ModelError for a model that probes cannot be made for.

        >>> found = attnscope.scan(attnscope.load("demo"), sequences=8)
        >>> found.atlas.named("induction")
    """
    check_loaded(call.model)
    return ScanPlan.of(call.model, call).run()


@dataclass(frozen=True)
class ScanPlan:
    """A scan that is about to be read: its trials, and its texts as tokens, where there are any.

    drawn: how many sequences were drawn, fewer than are asked for where only the cost is wanted.
    """

    model: LoadedModel
    options: ScanOptions
    planned: Plan
    prompts: Sequence[Prompt] | None = None

    @classmethod
    def of(cls, model: LoadedModel, options: ScanOptions, drawn: int | None = None) -> ScanPlan:
        """What is to be read. Raises as `study.atlas.scan.plan` and `prompts_of`."""
        count = options.sequences if drawn is None else drawn
        planned = plan(model, seed=options.seed, sequences=count, pool=options.pool)
        return cls(model, options, planned, None if options.texts is None else prompts_of(model, options.texts))

    def tokens(self) -> dict[str, int]:
        """{trial: tokens}, of all sequences that are asked for."""
        return scan_cost(self.model, self.options.sequences, self.options.pool)

    def seconds(self) -> float:
        """About how long it takes, by a batch that is read now."""
        each = scan_seconds(self.model, self.planned, self.options.sequences)
        return each * (sum(self.tokens().values()) + sum(map(len, self.prompts or ())))

    def run(self, tell: Teller = SILENT, style: Style = Style()) -> Scan:
        """Read the probes, and then the texts; with a folder, write there and draw."""
        into = None if self.options.out is None else Path(self.options.out)
        with tell.stage("reading probes", self.planned.tokens, "tokens") as advance:
            atlas = scan_heads(self.model, self.planned, into, force=self.options.force, advance=advance)
        found = Scan(self.model, atlas, self.planned.facts)
        if into is not None:
            with tell.stage("drawing"):
                save_probes(atlas, into, self.model.name, style)
        if not self.prompts:
            return found
        with tell.stage("reading texts", len(self.prompts), "texts") as advance:
            read = on_texts(self.model, self.prompts, into, force=self.options.force, advance=advance)
        if into is not None:
            with tell.stage("drawing"):
                save_head_js(read, atlas, into / f"{HEAD_JS}.{style.image}", style.of_model(self.model.name))
        return replace(found, texts=read)


@dataclass(frozen=True, repr=False)
class Scan(Record):
    """A model's atlas; texts: how far apart its heads are on texts, where some were given.

    facts: what tells the scan from another.
    """

    model: LoadedModel
    atlas: Atlas
    facts: Mapping[str, Any]
    texts: OnTexts | None = None

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        """{role: names of its heads, as `L3H0`}, of the roles that any head has."""
        from attnscope.cells import head_name

        named = self.atlas.by_role()
        return {
            role: [head_name(layer, head) for layer, heads in of.items() for head in heads]
            for role, of in named.items()
            if of
        }

    @property
    def line(self) -> str:
        said = ", ".join(f"{len(heads)} {role}" for role, heads in self.roles.items()) or "no role"
        return f"{len(self.atlas.heads)} heads of {self.model.name}: {said}"

    def table(self) -> pa.Table:
        """A row per contrast and head, see `Atlas.table`; those with a role or a mark first."""
        return self.atlas.table(self.atlas.order())

    def figure(self, style: Style = Style()) -> Picture:
        """Every probe as a layers x heads map of its effects."""
        style = replace(style, image="png")
        return picture_of(
            f"probes of {self.model.name}", lambda to: save_probes(self.atlas, to, self.model.name, style)
        )

    def _picture(self) -> Picture:
        return self.figure()

    def export(self, folder: str | Path, *, force: bool = False, style: Style = Style()) -> list[Path]:
        """Write atlas.json, tables and pictures, which `atlas=folder` and `--atlas` read; the paths.

        Raises UsageError for a folder that holds another scan, unless force says to write over it.
        """
        into = Path(folder)
        claim(into, READINGS, "scan", with_weights(self.facts, self.model), force)
        self.atlas.save(into)
        save_probes(self.atlas, into, self.model.name, style)
        if self.texts is not None:
            save(self.texts.js_table(), into / DIVERGENCES)
            save(self.texts.looks_table(), into / LOOKS)
            save_head_js(self.texts, self.atlas, into / f"{HEAD_JS}.{style.image}", style.of_model(self.model.name))
        return sorted(path for path in into.iterdir() if path.is_file() and not path.name.startswith("."))
