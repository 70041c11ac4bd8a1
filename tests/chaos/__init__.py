"""Faults caused in real trainer processes, and what the supervisor makes of each: `make chaos` (docs/supervise.md)."""

import sys
from pathlib import Path

#: The resident's own lab and trainer are used here too.
RESIDENT = Path(__file__).parents[1] / "resident"
if str(RESIDENT) not in sys.path:
    sys.path.insert(0, str(RESIDENT))
