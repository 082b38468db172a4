"""Models that stay loaded, and who asks them: an ask and its purpose cross the socket, and a record comes back.

place.py     the socket, its folder, and who is at the other end
identity.py  whether code, environment and files of a model are the same on both sides
wire.py      frames: a header in JSON, and arrays as bytes
records.py   records as JSON and arrays, and back
client.py    asks, in place of a pass of its own
server.py    sockets and turns, in a process without torch; worker.py: the models, in another
relay.py     a question to the worker and its answer back, whoever stops
reader.py    templates and tokenizers that need a process of their own, for the worker
"""
