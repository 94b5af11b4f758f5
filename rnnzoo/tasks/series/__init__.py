"""Sequences of numbers: your own, archives of time series, forecasts.

sequence_task    the core of such tasks; inputs of a trained model, checked
answers          classes or numbers, of a sequence or of each step
forecasting      the next steps of series; forecaster has the models, and heads
                 their distributions
sequences        your own .npz files, and sets of TFDS: npz,
                 sequence_arrays, sequence_checks
time_series      the UEA and UCR archives
lorenz           forecasts of the Lorenz system
"""
