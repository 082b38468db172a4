"""`attnscope.parity`, and what the command of that name runs: every layer against attention written from the papers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnscope.certificate.check import ATOL, TEXT, certificate, check_parity, in_words, parity_table
from attnscope.errors import UsageError, hints_of
from attnscope.model.options import LoadOptions
from attnscope.model.selection import resolve_roles
from attnscope.observe.request import CaptureSpec, Reading, spec_of
from attnscope.observe.run import prepare
from attnscope.utils.files import save_json
from attnscope.utils.schema import takes_fields
from attnscope.utils.tables import TableRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.certificate.check import ParityReport
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.atlas import HeadNames
    from attnscope.observe.request import Text
    from attnscope.observe.run import Run


@dataclass(frozen=True, kw_only=True)
class ParityOptions(Reading):
    """What is compared; how the text is read is of `Reading`.

    engine: "eager" compares the model's own matrices, "probe" the rows of the kernel that the model runs with.

    select: heads with weights to compare, all without it. atlas: what `@ROLE` in select names. atol: what weights,
    and outputs relative to their norm, may differ by. whole: compare hidden states and output, too, with a second
    instance that transformers alone loads from the files.
    """

    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    atol: float = ATOL
    whole: bool = False
    engine: Literal["eager", "probe"] = "eager"

    def __post_init__(self) -> None:
        if not self.atol >= 0:
            raise UsageError(f"atol: expected a size from 0, got {self.atol}", "leave it out for 1e-5")

    def ask(self, text: Text) -> CaptureSpec:
        """How a text is read."""
        return spec_of(text, self, engine=self.engine, select=self.select, atlas=self.atlas)


@dataclass(frozen=True)
class ParityCall(ParityOptions):
    """What `attnscope.parity` is called with."""

    model: LoadedModel
    text: Text | None = None


@hints_of(LoadOptions)
@takes_fields(ParityCall)
def parity(call: ParityCall) -> Parity:
    """Every attention layer against attention written from the papers, computed from the layer's own weights.

    text: the text, a Prompt, token ids or a sound; without one, a built-in sentence. options: the fields of
    `ParityOptions`: select, atlas, atol, whole, engine, and of `Reading`: chat, truncate, generate, target, picture,
    pair, global_tokens. Raises InputError for a text that does not fit the model, UsageError for an option that does
    not exist.

        >>> attnscope.parity(attnscope.load("demo")).holds
        True
    """
    return checked(prepare(call.model, call.ask(TEXT if call.text is None else call.text)), call)


def checked(run: Run, options: ParityOptions) -> Parity:
    """The forward pass of a run, each of its layers compared with the oracle."""
    report = check_parity(
        run.loaded,
        run.prompt,
        source=run.source,
        select=options.select and resolve_roles(options.select, run.named),
        atol=options.atol,
        engine=run.engine,
        whole=options.whole,
    )
    return Parity(report, run)


@dataclass(frozen=True, repr=False)
class Parity(TableRecord):
    """What every layer of one run differs by from the oracle; see `ParityReport`."""

    report: ParityReport
    run: Run

    @property
    def holds(self) -> bool:
        """Whether all layers were checked and hold, and the whole model where that was asked for."""
        return self.report.holds

    @property
    def failures(self) -> list[str]:
        """Why layers do not hold, or could not be checked, in words."""
        return [in_words(layer, self.report) for layer in (*self.report.failures, *self.report.unchecked)]

    @property
    def line(self) -> str:
        levels = ", ".join(f"{stack} {level}" for stack, level in self.report.levels.items())
        verdict = "holds" if self.holds else f"does not hold or is not shown: {'; '.join(self.failures)}"
        return f"{self.run.loaded.name}, {len(self.report.layers)} layers ({levels}) {verdict}"

    def table(self) -> pa.Table:
        """A row per attention call: level, holds, and every difference; see `parity_table`."""
        return parity_table(self.report)

    def certificate(self) -> dict[str, Any]:
        """What was proved, as JSON has it: the weights' sha256, versions, text, levels, differences."""
        return certificate(self.report, self.run.loaded, self.run.prompt, self.run.source)

    def export(self, path: str | Path) -> Path:
        """Write the certificate into a file, or as certificate.json into a folder; the path."""
        file = Path(path)
        return save_json(self.certificate(), file / "certificate.json" if file.suffix != ".json" else file)
