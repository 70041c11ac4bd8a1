"""Releases: build, send what changed, preflight, activate."""
