"""The command line: parse, call, print, exit code. Nothing else in this package prints.

`main` has the commands that run something; the others stand by what they are about. Nothing here
imports PyTorch before a command needs it.
"""
