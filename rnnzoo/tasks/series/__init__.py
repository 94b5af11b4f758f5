"""Sequences of numbers: your own, archives of time series, forecasts.

sequence_task    what these tasks share
answers          classes or numbers, of a sequence or of each step
sequences        your own .npz files: npz, sequence_arrays, sequence_checks
sequence_inputs  what a trained model is asked to answer, checked
time_series      the UEA and UCR archives; uea reads them
har              human activity recognition, UCI HAR
lorenz           forecasts of the Lorenz system
"""
