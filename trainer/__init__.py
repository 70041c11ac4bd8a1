"""Trains a DFlash drafter for speculative decoding: target processes feed drafter processes.

Imports nothing of `dflash_ops`; docs/trainer-design.md lists the parts. Importing this package imports no torch.
"""
