"""`attnscope scan --texts`: what heads do on texts, and the report on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from attnscope.cli.options import Exporting
    from attnscope.figures import Style
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.atlas.texts import OnTexts
    from attnscope.text.prompt import Prompt


def texts_cost(prompts: Sequence[Prompt], layers: int) -> str:
    """What reading them takes, and how many were cut."""
    cut = sum(prompt.removed > 0 for prompt in prompts)
    longest = max(map(len, prompts))
    said = f" ({cut} cut to {longest})" if cut else ""
    return f"{len(prompts)} texts{said}: {sum(map(len, prompts))} tokens x {layers} layers"


def read_texts(loaded: LoadedModel, atlas: Atlas, prompts: Sequence[Prompt], kept: Exporting, style: Style) -> OnTexts:
    """Read the texts into --out, and draw how far apart heads are on them."""
    from attnscope.show.atlas import HEAD_JS, save_head_js
    from attnscope.study.atlas.texts import on_texts

    assert kept.out is not None
    with unwinding():
        with output.progress("reading texts", len(prompts), kept.quiet, "texts") as advance:
            found = on_texts(loaded, prompts, kept.out, force=kept.force, advance=advance)
        with output.progress("drawing", None, kept.quiet):
            save_head_js(found, atlas, kept.out / f"{HEAD_JS}.{style.image}", style.of_model(loaded.name))
    return found


def looked(found: OnTexts, head: tuple[int, int]) -> str:
    """`sink 82 %`: what a head looks like on most texts that show it."""
    shares = {look: share for look, share in found.shares.get(head, {}).items() if look != "-"}
    return next((f"{look} {cells.percent(100 * share)}" for look, share in shares.items()), cells.MISSING)
