"""Skeleton action recognition: NTU RGB+D 60 and 120.

skeletons        the task
skeleton_frames  sampling of frames, origin, augmentation
skeleton_inputs  inputs of `predict`, checked
ntu_files        a .skeleton file and its name: reads one
ntu_tracks       the two main persons of a file
ntu_conversion   a folder of files to one array, `python -m`
ntu_search       finds the files in a folder
ntu_arrays       the array on the disk and in memory
ntu_splits       protocols: who trains and who tests
ntu_motions      synthetic recordings
"""
