"""`attnscope sentences`: how a text is cut into sentences."""

from __future__ import annotations

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.options import ModelText
from attnscope.cli.output import Printing

EXAMPLES = ('attnscope sentences --text "The bank. The river."',)


@with_options(ModelText, Printing)
def sentences(text: ModelText, printing: Printing) -> int:
    """The sentences of a text, one a row."""
    from attnscope.cli.one_text import load_model, read_text
    from attnscope.observe.request import CaptureSpec
    from attnscope.observe.run import prepare
    from attnscope.utils.tables import as_table

    format = output.wanted_format(printing.format)
    ask = CaptureSpec(read_text(text, printing))
    spans = prepare(load_model(text, printing), ask).prompt.sentences
    columns = {"first": [span.start for span in spans], "sentence": [span.name for span in spans]}
    output.emit(as_table(columns), format, lambda: "\n".join(columns["sentence"]))
    return 0
