"""A command each: parses, calls, renders. No logic."""
