"""What a text is read for, one file each: an ask and a purpose make a question, for a server or for this process.

    ask, purpose = Ask("the bank", Request(query="last"), engine="eager"), ExplainHead("L2H3")
    purpose.answer(loaded, ask)            # in this process
    answered(options, ask, SILENT, purpose=purpose)   # of `attnscope serve`, without torch

A newcomer adds a file, and a line here.
"""

from attnscope.purposes.cut import CutEdges
from attnscope.purposes.explain import ExplainHead
from attnscope.purposes.observe import Observe
from attnscope.purposes.page import ShowPage
from attnscope.purposes.purpose import Purpose
from attnscope.purposes.take_apart import TakeApart
from attnscope.purposes.tokenise import Tokenise

__all__ = ["PURPOSES", "CutEdges", "ExplainHead", "Observe", "Purpose", "ShowPage", "TakeApart", "Tokenise"]

PURPOSES: dict[str, type[Purpose]] = {
    one.name: one for one in (Observe, Tokenise, ShowPage, ExplainHead, TakeApart, CutEdges)
}
