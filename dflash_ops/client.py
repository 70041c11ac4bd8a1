"""The operator's side of the resident: one job on one host, one exec a question."""
