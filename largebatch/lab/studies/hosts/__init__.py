"""Training on hosts that are network namespaces of this machine, behind links of a given rate."""
