"""What to do with every text of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.batch.rows import Output
from attnscope.model.loading import LoadOptions
from attnscope.observe import Request
from attnscope.text.prompt import Side


@dataclass(frozen=True)
class Job:
    """What to do with every text; a worker on another machine needs no more than this.

    batch_tokens: the most tokens of a padded batch, None to choose by memory. shard_bytes: about what one shard's files
    hold. one_by_one: a batch of one text each (figures are drawn from those).
    """

    load: LoadOptions = LoadOptions()
    request: Request = Request(relations=True)
    select: str | None = None
    output: Output = Output()
    chat: bool = False
    truncate: Side | None = None
    batch_tokens: int | None = None
    shard_bytes: int = 64 * 2**20
    strict: bool = False

    @property
    def one_by_one(self) -> bool:
        """Whether every text is a batch of its own: maps are kept of one text at a time."""
        return self.request.maps is not None
