"""Audit of a training loop on several workers: compare its updates with those of one process.

`auditing` is the call and makes the script's own updates; the other modules measure. What can be
found is in the tables of `rules`. `restoring` undoes everything; `ranks` keeps the workers together
when one of them fails.
"""

from largebatch.audit.auditing import audit as audit
from largebatch.audit.findings import Findings as Findings
from largebatch.callable_module import make_callable
from largebatch.rules import Finding as Finding

make_callable(__name__, audit)
