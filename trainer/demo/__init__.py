"""A real target that any machine can build in a minute or two: a byte-level Qwen3 and prompts for it.

A tour of the whole tool needs a target whose greedy text a drafter can learn. Downloading one would need a network, a
licence and gigabytes; Python's own help texts (`pydoc_data.topics`, 0.5 MB) are on every machine that can run this.
"""
