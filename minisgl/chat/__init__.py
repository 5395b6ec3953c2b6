"""`minisgl chat`: a conversation on the terminal with a model, behind an OpenAI-compatible server or in this process.

Knows neither the server nor the offline class: the command line hands over what answers. Called by the command line only, when it is
asked for: the terminal's libraries would make every other command slower to start.
"""
