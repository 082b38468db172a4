"""One head's arithmetic for one sentence, step by step, each step compared with the model's own values.

steps.py        what a step is, and how it is compared
attention.py    from q, k, v to the heads' outputs
traced.py       a head of a real model; projections.py: what is before its scores and after its values
toy.py          the same without a model, on "I saw a saw"
scaling.py      std(q . k) against d_k on random data
jsonl.py        an explanation as JSON lines
"""

from attnscope.callable_room import callable_room
from attnscope.explain.steps import Check, Explanation, Numbers, Step
from attnscope.explain.toy import explain_toy
from attnscope.explain.traced import explain_head

__all__ = ["Check", "Explanation", "Numbers", "Step", "explain_head", "explain_toy"]

callable_room(__name__)
