"""Engines: how a cell runs over time, whichever cell it is."""
