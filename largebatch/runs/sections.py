"""The sections that extensions add to the report of a run."""

from largebatch.training.protocols.section import learners_section

SECTIONS = (learners_section,)
"""Each returns its section of a run folder, or None if the folder has nothing for it."""
