"""The HTTP server: a launcher and its children (API, tokenizer, one scheduler per rank), each a process of its own.

    launcher.py            the program behind `minisgl serve`; options.py, config_file.py are its tools
    *_process.py           its children's programs, but for that of a rank, which is in minisgl.processes with all that starts them
    health.py              /health, by signs of life in shared memory
    app.py                 the API process: routes; protocol.py is what clients send, answers.py what they receive
    generation.py          runs a generating request; chat_completions.py, completions.py, generate.py, logprobs.py say how it looks
    frontend.py            the API's end of the sockets; http_errors.py, defaults.py, openapi.py what their names say

Importing the package loads none of them.
"""
