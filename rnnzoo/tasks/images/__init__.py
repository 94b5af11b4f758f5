"""Images read as sequences: MNIST and CIFAR-10, row by row or by pixels.

smnist        the task; mnist is where its data come from
cifar         the task
"""
