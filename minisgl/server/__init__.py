"""The HTTP server: a launcher and its three children (API, tokenizer, scheduler), each a process of its own.

    launcher.py            starts, watches and ends the children; the program behind `minisgl serve`
    workers.py             one child as the launcher sees it
    child.py               the launcher as a child sees it
    *_process.py           the children's programs
    app.py, chat_completions.py, protocol.py, http_errors.py, frontend.py    the API process, from route to socket

Importing the package loads none of them.
"""
