"""The ranks of this process: start, end, variables, diagnosis, and the state that ``finalize`` replaces."""
