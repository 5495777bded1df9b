"""Studies whose results are frozen with their commit: their scripts, tables and figures."""
