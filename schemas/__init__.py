"""What crosses a process boundary: events, directives, topics, both encodings, examples.

Imports nothing of ours. Everything a foreign producer or consumer needs to know is here.
"""
