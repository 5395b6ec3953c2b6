"""The HTTP server: a launcher and its children (API, tokenizer, one scheduler per rank), each a process of its own.

    launcher.py            the program behind `minisgl serve`; options.py, config_file.py, run_files.py, signals.py are its tools
    children.py            all children as the launcher sees them; workers.py one of them
    child.py               the launcher as a child sees it
    *_process.py           the children's programs; served_scheduler.py is a rank's
    health.py              /health, by signs of life in shared memory
    app.py                 the API process: routes; protocol.py is what clients send, answers.py what they receive
    generation.py          runs a generating request; chat_completions.py, completions.py, generate.py, logprobs.py say how it looks
    frontend.py            the API's end of the sockets; http_errors.py, defaults.py, openapi.py what their names say

Importing the package loads none of them.
"""
