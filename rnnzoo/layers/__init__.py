"""Layers: cells with parameters, alone, stacked and in both directions."""
