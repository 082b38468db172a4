"""What a text is read for, one file each: an ask and a purpose make a question, for a server or for this process.

    ask, purpose = Ask("the bank", Request(query="last"), engine="eager"), ExplainHead("L2H3")
    purpose.answer(loaded, ask)            # in this process
    answered(options, ask, SILENT, purpose=purpose)   # of `attnscope serve`, without torch

A newcomer adds a file, and a line in `named.py`.
"""
