"""Images read as sequences: MNIST and CIFAR-10, row by row or by pixels.

smnist        the task; mnist and idx are where its data come from
cifar         the task; cifar_files reads its archive
"""
