"""MLPerf Training: its rules, its log, its checkers and their page."""
