"""Gathers what triage reads: files, folders, standard input, compressed logs, and the playbooks."""
