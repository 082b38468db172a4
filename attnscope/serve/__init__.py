"""Models that stay loaded, and who asks them: an ask and its purpose cross the socket, and a record comes back.

wire.py       frames on a socket, who is at its other end, and whether both ends are the same
records.py    records as JSON and arrays, and back
questions.py  what a text is read for: each purpose with its record
client.py     asks, in place of a pass of its own; hands a question to the worker and its answer back
server.py     sockets and turns, in a process without torch
worker.py     the models, in another; texts that need a process of their own are read in a third
session.py    `attnscope.connect`
page.py       the live page
"""
