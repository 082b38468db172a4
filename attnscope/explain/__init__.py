"""One head's arithmetic for one sentence, step by step, each step held against the model's own values.

steps.py     what a step is, and the arithmetic from q, k, v to the heads' outputs
traced.py    a head of a real model       layer_steps.py   its projections, positions and output projection
toy.py       the same without a model, on "I saw a saw"
scaling.py   std(q . k) against d_k on random data
"""

from attnscope.explain.steps import Check, Explanation, Numbers, Step
from attnscope.explain.toy import explain_toy
from attnscope.explain.traced import explain_head

__all__ = ["Check", "Explanation", "Numbers", "Step", "explain_head", "explain_toy"]
