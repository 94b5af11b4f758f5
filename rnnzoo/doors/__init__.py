"""Interfaces of other libraries: an RL agent's ScannedRNN, FlashRNN."""
