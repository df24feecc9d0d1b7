"""Exploring a declared machine before it runs: every event, every failure, against named invariants."""
