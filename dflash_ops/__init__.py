"""Supervises long multi-GPU training jobs on remote machines and repairs what can be repaired."""

__version__ = "0.1.0"
