"""The way to a machine: run, stream, send, fetch, each with a mandatory deadline."""
