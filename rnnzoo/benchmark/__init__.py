"""`python -m rnnzoo.benchmark`: layers and recurrences timed and checked."""
