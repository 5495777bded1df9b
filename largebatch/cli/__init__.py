"""The command line: parse, call, print, exit code. Only this folder prints.

Each command is in the file of its subject; `main` puts them together.
"""
