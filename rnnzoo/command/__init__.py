"""The console script `rnnzoo`: train, list, use, compare, sweep.

rnnzoo train gru_smnist --config.num_seeds=3
rnnzoo evaluate runs/mine
rnnzoo compare runs/mine runs/other
rnnzoo sweep gru_smnist --workdir=sweeps/rate \
        --grid=config.optimizer.learning_rate=1e-3,3e-4

program     which command was given
answers     files of inputs, and files of a model's answers
comparison  several runs in a table and a figure
sweep       one config with many values of its fields
"""
