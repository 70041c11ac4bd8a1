"""Here so that tests of every folder find `ending`."""
