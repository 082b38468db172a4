"""What to do with every text of a corpus, and what is written of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from attnscope.errors import UsageError
from attnscope.inputs.prompt import Side
from attnscope.metrics.metrics import LENGTHS, LOOKBACKS
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request

if TYPE_CHECKING:
    from attnscope.export.drawing import Pictures
    from attnscope.observe.atlas import HeadNames

TABLES = ("heads", "relations")
DatasetFormat = Literal["parquet", "csv", "jsonl"]


@dataclass(frozen=True)
class DatasetOutput:
    """What is written, and how.

    tables: of TABLES; `texts` is always written. format: a DatasetFormat. spreadsheet: text cells that a
    spreadsheet would run as a formula begin with an apostrophe. pictures: what to draw of a text (a function of the
    observation), and draws it into a folder, in a worker process. about: what each file says of its run. chosen: which
    of `query` and `key` name tokens of each text. spans: the names of spans whose mass on each other is a table.
    targets: whether each text has one, which an encoder-decoder's decoder reads. answers: whether each text has one
    after it. metrics: those that heads have besides METRICS. entries: what relations list, as in `View.weights`.
    """

    tables: tuple[str, ...] = TABLES
    format: str = "parquet"
    min_weight: float | None = None
    weights: bool = False
    spreadsheet: bool = False
    pictures: Pictures | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    targets: bool = False
    answers: bool = False
    metrics: tuple[str, ...] = ()
    entries: Literal["softmax", "scores", "value"] = "softmax"

    @property
    def names(self) -> tuple[str, ...]:
        """The tables, with `texts`, and `spans` where there are any."""
        return ("texts", *self.tables, *(("spans",) if self.spans else ()))


@dataclass(frozen=True)
class Job:
    """What to do with every text; a worker on another machine needs no more than this.

    batch_tokens: the most tokens of a padded batch, None to choose by memory. shard_bytes: about what the files of one
    shard hold. strict: the first item that fails ends the run. engine: auto is what is faster, by the rule of a single
    text (`observe/choice.py`), or the kernel for many short ones together; else eager while the batch's matrices fit.
    query_field, key_field: of the records, where each says itself which tokens are asked about. target_field: where
    each says what an encoder-decoder's decoder reads; without it, what the model itself makes of the text.
    answer_field: where each gives the answer that is read after its text; answer: the same one after every text.
    audio_field: where each names the file of a sound, which is read instead of the text; picture_field: the file of a
    picture to read with its text, or a list of them; pair_field: the second text of a pair. global_tokens: as of `Ask`.
    max_tokens: every text is cut to so many, on the side `truncate`, else on the right. atlas: what names the model's
    heads, where there is one.
    """

    load: LoadOptions = LoadOptions()
    request: Request = Request(relations=True)
    select: str | None = None
    output: DatasetOutput = DatasetOutput()
    chat: bool = False
    truncate: Side | None = None
    batch_tokens: int | None = None
    shard_bytes: int = 64 * 2**20
    strict: bool = False
    engine: Literal["auto", "eager", "fused", "tiles", "numba", "triton"] = "auto"
    query_field: str | None = None
    key_field: str | None = None
    target_field: str | None = None
    answer_field: str | None = None
    answer: str | None = None
    audio_field: str | None = None
    picture_field: str | None = None
    pair_field: str | None = None
    global_tokens: str | None = None
    max_tokens: int | None = None
    atlas: HeadNames | None = None

    def __post_init__(self) -> None:
        """What the output says of the request is read off the request."""
        if self.request.view.weights == "logit":
            raise UsageError("effects on a logit are read of one text at a time", "use {weights=value}, or `relations`")
        metrics = (*(name for name in LENGTHS if name in self.request.metrics), *(LOOKBACKS if self.answered else ()))
        output = replace(self.output, answers=self.answered, metrics=metrics, entries=self.request.view.weights)
        object.__setattr__(self, "output", output)

    @property
    def answered(self) -> bool:
        """Whether an answer follows each text."""
        return (self.answer_field, self.answer) != (None, None)

    @property
    def one_by_one(self) -> bool:
        """Whether every text is a batch of its own: maps are kept of one text at a time, so are sounds and pictures."""
        return self.request.maps is not None or self.media

    @property
    def media(self) -> bool:
        """Whether a sound or pictures are read with every text, or instead of it."""
        return (self.audio_field, self.picture_field) != (None, None)
