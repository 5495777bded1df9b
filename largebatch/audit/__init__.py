"""Audit of a training loop on several workers: compare its updates with those of one process.

`auditing` is the call and makes the script's own updates; the other modules are checks. `restoring`
undoes everything; `ranks` keeps the workers together when one of them fails.
"""

from largebatch.audit.auditing import audit as audit
from largebatch.audit.findings import Finding as Finding
from largebatch.audit.findings import Findings as Findings
from largebatch.callable_module import make_callable

make_callable(__name__, audit)
