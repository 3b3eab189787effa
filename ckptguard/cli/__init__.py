"""The command line: parse, call, print. One file per command; heavy imports happen inside the commands."""
