"""`dflash-ops demo`: the whole way on this machine with a tiny target, through the same parts as any other job."""
