"""One head's arithmetic for one sentence, step by step, each step compared with the model's own values.

records.py      what a step is, its words, and an explanation as JSON lines; without torch
attention.py    from q, k and v to the heads' outputs, what is before and after, and how a step is compared
traced.py       a head of a real model
toy.py          the same without a model, on "I saw a saw"; std(q . k) against d_k on random data
"""
