"""Parallel layouts; pure."""
