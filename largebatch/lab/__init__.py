"""Questions that take many runs, or none: studies, protocols, predictions, referees.

Nobody who trains needs to open this folder, and the core imports nothing of it.
"""
