"""What a test needs and this machine has not: CI must have it, other machines may skip."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def under_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def lacking(why: str) -> NoReturn:
    if under_ci():
        pytest.fail(f"under CI this must run: {why}", pytrace=False)
    pytest.skip(why)
