"""Scripts with planted faults, and the curves of faulty loops."""
