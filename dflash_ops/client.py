"""The operator's side of the resident: one job on one host, one exec a question.

The rule here: an answer is the resident's or it is an error. A machine that cannot be asked makes a snapshot in state
`unreachable`, a job that was never deployed one in state `unknown`; neither is a traceback.
"""
