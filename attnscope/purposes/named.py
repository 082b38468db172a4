"""Every purpose by its name, as a question says it."""

from attnscope.purposes.cut import CutEdges
from attnscope.purposes.explain import ExplainHead
from attnscope.purposes.observe import Observe
from attnscope.purposes.page import ShowPage
from attnscope.purposes.purpose import Purpose
from attnscope.purposes.take_apart import TakeApart
from attnscope.purposes.tokenise import Tokenise

PURPOSES: dict[str, type[Purpose]] = {
    one.name: one for one in (Observe, Tokenise, ShowPage, ExplainHead, TakeApart, CutEdges)
}
