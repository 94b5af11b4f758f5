"""Skeleton action recognition: NTU RGB+D 60 and 120.

skeletons        the task
skeleton_frames  sampling of frames, origin, augmentation
skeleton_inputs  inputs of `predict`, checked
ntu_files        names, official splits, and the reader of a .skeleton file
ntu_tracks       the two main persons of a file
ntu_conversion   a folder of files to one array, `python -m`
ntu_arrays       the array on the disk and in memory
ntu_motions      synthetic recordings
"""
