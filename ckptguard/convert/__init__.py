"""The planners: import, export. What goes where is decided here; nothing is read or written."""
