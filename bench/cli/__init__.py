"""The verbs: one file a verb, parse, call, print, exit code."""
