"""Pure health and decisions: no I/O, the clock is passed in."""
