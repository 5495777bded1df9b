"""Tests that need hosts of network namespaces."""

import pytest

from largebatch.lab.studies.namespaces import lacking

_REASON = lacking()
needs_hosts = pytest.mark.skipif(bool(_REASON), reason=f"this machine lacks {_REASON}")
