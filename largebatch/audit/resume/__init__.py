"""The audit of a resumption: is the rest of a run the same training as without the stop?"""
