"""The page that answers: `attnscope serve --page`. A browser asks, a command of its own writes what it shows.

question.py   what may be asked, and the command that it is
asking.py     that command in a process of its own, and what it says on the way
guard.py      who may ask: this machine, this page, who has the token
app.py        the addresses, and the server in a thread
page.*        what the browser loads; each answer is in a frame of it
"""
